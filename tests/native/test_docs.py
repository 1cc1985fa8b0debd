"""The example of docs/native.md runs."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "native.md"


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {})
