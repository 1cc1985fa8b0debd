"""`make sanitize-gpu`, with a tool that only runs its command and says what it was told to find."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import sanitize_gpu

TOOL = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
assert words[words.index("--kernel-name") + 1] == "kernel_substring=slotwise"
report = words[words.index("--log-file") + 1]
code = subprocess.call(words[words.index(sys.executable):])
with open(report, "w") as file:
    file.write("========= COMPUTE-SANITIZER\\n")
    if os.environ["FOUND"] != "0":
        file.write("========= Invalid __global__ read of size 4 bytes\\n")
    file.write(f"========= ERROR SUMMARY: {{os.environ['FOUND']}} errors\\n")
sys.exit(code)
"""
TESTS = """
import time
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(5))
def test_good(number):
    pass

@pytest.mark.skipif(__file__.endswith("one.py"), reason="not on this card")
def test_other():
    {body}
"""


@pytest.fixture
def sanitize(monkeypatch, tmp_path, capsys):
    """Runs it over two files with this tool."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: on a GPU\n")

    def run(found=0, body="pass", seconds=60):
        monkeypatch.setenv("FOUND", str(found))
        files = [Path("test_one.py"), Path("test_two.py")]
        for file in files:
            file.write_text(TESTS.format(body=body))
        words = ["memcheck", "--processes", "2", "--seconds", str(seconds), *map(str, files)]
        monkeypatch.setattr(sys, "argv", ["sanitize_gpu.py", *words])
        code = sanitize_gpu.main()
        return code, capsys.readouterr().out

    return run


def test_every_test_is_run_once_and_counted(sanitize):
    code, out = sanitize()
    assert code == 0
    assert "test_one: 5 of 6 tests passed, 0 errors\n" in out
    assert "test_two: 6 of 6 tests passed, 0 errors\n" in out


def test_what_the_tool_finds_is_shown(sanitize):
    code, out = sanitize(found=3)
    assert code == 1
    # Three processes for each file.
    assert "test_two: 6 of 6 tests passed, 9 errors\n" in out
    assert "test_two.1.report:\n========= COMPUTE-SANITIZER\n========= Invalid __global__" in out


def test_a_failed_test_is_no_success(sanitize):
    code, out = sanitize(body="assert False")
    assert code == 1
    assert "test_two: 5 of 6 tests passed, 0 errors\n" in out


def test_what_is_cut_off_is_told(sanitize):
    code, out = sanitize(body="time.sleep(60)", seconds=5)
    assert code == 1
    assert re.search(r"test_two: \d of 6 tests passed, 0 errors, \d of 3 processes did not", out)


def test_what_is_interrupted_ends_at_once(sanitize, tmp_path):
    def interrupt():
        while not (tmp_path / "began").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    body = "open('began', 'w').close(), time.sleep(600), open('ended', 'w').close()"
    with pytest.raises(KeyboardInterrupt):
        sanitize(body=body, seconds=1200)
    # No test was waited for.
    assert not (tmp_path / "ended").exists()


def test_without_the_tool(monkeypatch, capsys):
    monkeypatch.setattr(sanitize_gpu, "find_sanitizer", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sanitize_gpu.py", "racecheck"])
    assert sanitize_gpu.main() == 2
    assert "CUDA toolkit" in capsys.readouterr().err
