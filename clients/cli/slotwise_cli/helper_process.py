"""Programs of ours that answer with JSON, run in a process of their own."""

import json
import subprocess
from typing import Any

from .output import CliError


def run_json(command: list[str], text: str = "") -> dict[str, Any]:
    """Run a helper that prints JSON; CliError with its last line when it fails.

    Its exit status 2 (what was asked for cannot be) becomes ours.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        code = 2 if done.returncode == 2 else 1
        raise CliError(f"`{' '.join(command[1:4])}` failed: {last}", exit_code=code)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
