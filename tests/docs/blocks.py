"""The fenced blocks of the documentation's pages, and the marks before them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What a test machine may lack: a mark says so, and the block is not run.
NEEDS = {
    "gpu": "an NVIDIA GPU",
    "docker": "a Docker engine, and minutes",
    "kubernetes": "a cluster",
    "network": "registries of other package managers",
    "grpcurl": "a program that Debian does not have",
    "minutes": "a build or a measurement of minutes",
}
MARK = re.compile(r"<!-- (needs|run by): (\S+) -->")
# For all blocks of a language of the page that have no mark of their own.
PAGE_MARK = re.compile(r"^<!-- (\w+) blocks run by: (\S+) -->$", re.MULTILINE)
FENCE = re.compile(r"^( *)```(.*)$")


@dataclass(frozen=True)
class Block:
    """One fence: what is in it, and how it is tested."""

    page: str
    # Of the opening fence, from 1.
    line: int
    language: str
    code: str
    # ("needs", what), ("run by", test file) or None.
    mark: tuple[str, str] | None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Everything that is read: in the site, on the first page, beside the clients."""
    top = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("clients/*/README.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """AssertionError where a fence is not closed."""
    of_page = {language: ("run by", path) for language, path in PAGE_MARK.findall(text)}
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        indent, language = opening[1], opening[2].strip()
        end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == "```"), None)
        assert end is not None, f"{page}:{at + 1}: this fence has no end"
        marked = MARK.fullmatch(lines[at - 1].strip()) if at else None
        mark = (marked[1], marked[2]) if marked else of_page.get(language)
        code = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end])
        yield Block(page, at + 1, language, code, mark)
        at = end + 1


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page.read_text(), name_of(page))]


def prose_of(text: str) -> str:
    """What is outside of fences and of comments."""
    kept, is_code = [], False
    for line in text.splitlines():
        if FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            kept.append(line)
    return re.sub(r"<!--.*?-->", "", "\n".join(kept), flags=re.DOTALL)


def spans_of(text: str) -> list[str]:
    """Code in the prose, `like this`."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(text))


def fault_of(block: Block, root: Path = ROOT) -> str | None:
    """What is wrong with a block's mark; None: nothing, or it has none."""
    if block.mark is None:
        return None
    kind, what = block.mark
    if kind == "needs":
        return None if what in NEEDS else f"nobody knows the need {what!r}: {', '.join(NEEDS)}"
    test = root / what
    if not what.startswith("tests/") or not test.is_file():
        return f"{what} is no test of ours"
    text = _with_helpers(test, root)
    if Path(block.page).name in text:
        return None
    missing = [line for line in commands_of(block.code) if line not in text]
    return f"{what} neither reads {block.page} nor has {missing[0]!r}" if missing else None


def _with_helpers(test: Path, root: Path) -> str:
    """A test's text, and that of what it takes from other files of the tests."""
    text = test.read_text()
    for module in re.findall(r"^from ([\w.]+) import", text, re.MULTILINE):
        helper = root / "tests" / f"{module.replace('.', '/')}.py"
        text += helper.read_text() if helper.is_file() else ""
    return text


def commands_of(code: str) -> list[str]:
    """Lines without their remarks."""
    lines = (re.sub(r"\s+# .*$", "", line).strip() for line in code.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
