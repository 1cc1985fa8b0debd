"""What the pages tell to run runs: each shell block, or a mark says by what, or what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from clients.gateways import running_gateway
from docs.blocks import (
    ROOT,
    Block,
    all_blocks,
    blocks_of,
    commands_of,
    fault_of,
    name_of,
    pages,
    prose_of,
)
from docs.words import faults

from slotwise_cli.demo_model import ensure_demo_model
from slotwise_cli.output import report_nothing
from slotwise_cli.server_process import running_server
from slotwise_client import Client

GRPC, HTTP = "127.0.0.1:50051", "http://127.0.0.1:8000"
TIMEOUT_S = 300
BLOCKS = all_blocks()


def to_run(blocks: Sequence[Block]) -> list[Block]:
    """Those without a mark that have a command which none before them has."""
    found, seen = [], set()
    for block in blocks:
        commands = set(commands_of(block.code))
        if block.language == "sh" and block.mark is None and commands - seen:
            found.append(block)
            seen |= commands
    return found


RUN = to_run(BLOCKS)
# Shown, not run: other languages are built by their clients' tests.
SHOWN = {"", "text", "go", "js", "java", "cpp", "rust", "yaml", "toml", "ini", "nginx", "haproxy"}
SHOWN |= {"promql", "proto", "diff"}
PAGES = pytest.mark.parametrize("page", pages(), ids=name_of)
# Commands are functions, so that no PATH of a block goes before them.
PRELUDE = """
set -e
slotwise() {{ {python} {shim} slotwise "$@"; }}
make() {{ command make --dry-run "$@" >/dev/null; }}
export -f slotwise make
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Addresses of a server and of its gateway, and a request that has ended with 40 tokens."""
    journal = tmp_path_factory.mktemp("journal")
    flags = ["--num-slots", "4", "--max-seq-len", "1024", "--journal", str(journal)]
    with (
        running_server(ensure_demo_model(), flags, report_nothing) as address,
        running_gateway(address) as gateway,
    ):
        with Client(address) as client:
            asked = client.complete("Once", temperature=0, max_new_tokens=40, ignore_eos=True)
        yield address, gateway.url, asked.request_id


@pytest.fixture
def checkout(tmp_path):
    """Looks like the repository's root; what a block writes there is nobody's loss."""
    for path in ROOT.iterdir():
        if path.name != "build":
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_a_block_runs(block, servers, checkout):
    done = run(block.code, servers, checkout)
    assert done.returncode == 0, f"{block.name}\n{block.code}\n{done.stdout}{done.stderr}"


def run(code: str, servers: tuple[str, str, str], cwd: Path) -> subprocess.CompletedProcess:
    grpc, http, request = servers
    shim = Path(__file__).parent / "shim.py"
    code = PRELUDE.format(python=sys.executable, shim=shim) + code.replace(HTTP, http)
    home = cwd / "home"
    home.mkdir()
    cache = os.environ.get("SLOTWISE_CACHE", str(Path.home() / ".cache" / "slotwise"))
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", code.replace(GRPC, grpc)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={
            **os.environ,
            "HOME": str(home),
            "PATH": programs,
            "SLOTWISE_CACHE": cache,
            "SLOTWISE_DOCS_SERVER": grpc,
            "SLOTWISE_DOCS_REQUEST": request,
        },
        cwd=cwd,
    )


def test_a_block_that_fails_is_noticed(servers, checkout):
    """In its first line too, and in a command of ours."""
    for number, code in enumerate(("false\ntrue", "slotwise generate --no-such-flag x\ntrue")):
        (checkout / str(number)).mkdir()
        assert run(code, servers, checkout / str(number)).returncode != 0


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_is_run_marked_or_only_shown(block):
    assert fault_of(block) is None
    if block.language == "json":
        json.loads(block.code)
    elif block.language == "python":
        assert block.mark, f"{block.name}: python blocks say which test runs them"
    else:
        assert block.language == "sh" or block.language in SHOWN, block.name


@PAGES
def test_commands_flags_and_words_of_make_are_there(page):
    assert faults(page.read_text(), name_of(page)) == []


@PAGES
def test_a_mark_stands_before_a_block(page):
    """Another place has no effect, and would say what is not so."""
    lines = page.read_text().splitlines()
    for above, below in zip(lines, [*lines[1:], ""], strict=True):
        if above.strip().startswith(("<!-- needs:", "<!-- run by:")):
            assert below.strip().startswith("```"), above


def test_wrong_marks_are_noticed():
    def fault(mark, code="make test", page=f"docs/{'x' * 9}.md"):
        return fault_of(Block(page, 1, "sh", code, mark))

    assert fault(None) is None
    assert fault(("needs", "gpu")) is None
    assert "luck" in fault(("needs", "luck"))
    assert "no test" in fault(("run by", "tests/docs/no_such_file.py"))
    assert "no test" in fault(("run by", "README.md"))
    own = "tests/docs/test_commands.py"
    assert fault(("run by", own), "make nothing" + "-at-all") is not None
    assert fault(("run by", own), "slotwise generate --no-such-flag x  # with a remark") is None
    assert fault(("run by", "tests/test_readme.py"), page="README.md") is None


def test_blocks_are_found_with_their_marks():
    text = (
        "<!-- python blocks run by: tests/a.py -->\n```python\n1\n```\n\n- x\n  <!-- needs: gpu -->"
    )
    text += "\n  ```sh\n  a  # b\n  # c\n  ```\n```sh\nd\n```\n`e` <!-- `f` -->\n"
    first, second, third = blocks_of(text, "p")
    assert (first.language, first.mark) == ("python", ("run by", "tests/a.py"))
    assert (second.code, second.mark, second.line) == ("a  # b\n# c", ("needs", "gpu"), 8)
    assert commands_of(second.code) == ["a"]
    assert third.mark is None
    assert "`e`" in prose_of(text)
    assert "f" not in prose_of(text)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`slotwise serve --tp 2` and `serve --help`, `slotwise bench`, `slotwise --version`", []),
        ("`slotwise serve --slots 3`", ["slotwise serve --slots 3: --slots"]),
        ("`slotwise serv`", ["slotwise serv"]),
        ("`slotwise serve --tp N`", []),
        ("```sh\nslotwise serve\n```", ["slotwise serve: Missing argument 'model'."]),
        ("`slotwise bench none`", ["slotwise bench none"]),
        (
            "```sh\nslotwise bench ladder \\\n  --fast\n```",
            ["slotwise bench ladder --fast: --fast"],
        ),
        ("`make test TESTS=tests/worker`, `PYTHON=x make demo`, to make haste", []),
        ("`make tests`", ["make tests"]),
        ("`--num-slots 3`, `--grace`, `--worker-timeout=3`", []),
        ("`--num-slot 3`", ["--num-slot 3"]),
    ],
)
def test_what_is_not_there_is_noticed(text, wrong):
    assert faults(text, "p") == wrong
