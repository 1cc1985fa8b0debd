"""README.md: what it tells to ask is answered, by the demo model and its gateway.

tests/docs/test_commands.py runs all of its shell blocks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clients.gateways import running_gateway

from slotwise_cli.demo_model import ensure_demo_model
from slotwise_cli.output import report_nothing
from slotwise_cli.server_process import running_server
from slotwise_client import Client

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GRPC, HTTP = "127.0.0.1:50051", "http://127.0.0.1:8000"
# The prompts that an example takes as given.
GIVEN = 'prompt = "Name a city."\ndocument = "A report by Ann, of 1999. " * 20\n'
TIMEOUT_S = 120


def blocks(heading: str, language: str) -> list[str]:
    """The code under a heading, up to the next one of its kind."""
    section = re.split(rf"^## {re.escape(heading)}$", README, flags=re.MULTILINE)[1]
    section = re.split(r"^## ", section, flags=re.MULTILINE)[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def commands(block: str) -> list[str]:
    """Of a shell's block; one may go over several lines, up to its closing quote."""
    found = []
    for line in re.findall(r"(?:[^'\n]|'[^']*')+", block):
        found.append(re.sub(r"\s+# .*$", "", line))
    return found


@pytest.fixture(scope="module")
def servers():
    """Addresses of the gRPC server and of its gateway."""
    flags = ["--num-slots", "4", "--max-seq-len", "1024"]
    with (
        running_server(ensure_demo_model(), flags, report_nothing) as address,
        running_gateway(address) as gateway,
    ):
        yield address, gateway.url


def run_shell(command: str, servers: tuple[str, str]) -> str:
    grpc, http = servers
    command = command.replace(HTTP, http)
    command = re.sub(r"^slotwise (generate|chat|attach|replay)", rf"\g<0> --server {grpc}", command)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PATH": path},
        cwd=ROOT,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_python(code: str, servers: tuple[str, str], **names: object) -> None:
    grpc, http = servers
    exec(compile(code.replace(GRPC, grpc).replace(HTTP, http), "README.md", "exec"), names)


def test_the_commands_that_ask(servers):
    (block,) = blocks("Serve and ask", "sh")
    asked = [line for line in commands(block) if line.startswith("slotwise generate")]
    assert len(asked) == 2
    assert "Paris" in run_shell(asked[0], servers)
    assert "yes" in run_shell(asked[1], servers) or "no" in run_shell(asked[1], servers)


def test_doctor(servers):
    (block,) = blocks("Serve and ask", "sh")
    (command,) = [line for line in commands(block) if line.startswith("slotwise doctor")]
    assert "smollm2-135m-instruct" in run_shell(command, servers)


def test_the_first_call(servers, capsys):
    (code,) = blocks("A first gRPC call", "python")
    run_python(code, servers)
    assert "Paris" in capsys.readouterr().out


def test_the_features(servers, capsys):
    with Client(servers[0]) as client:
        for code in blocks("The generation API and the prefix cache", "python"):
            run_python(GIVEN + code, servers, client=client)
    printed = capsys.readouterr().out
    assert "city" in printed
    found, asked = map(int, re.findall(r"^(\d+) of (\d+)$", printed, re.MULTILINE)[0])
    assert 0 < found < asked


def test_curl(servers):
    (block,) = blocks("For programs that speak to OpenAI", "sh")
    (command,) = [line for line in commands(block) if line.startswith("curl")]
    assert "Paris" in run_shell(command, servers)


def test_the_openai_package(servers, capsys):
    (code,) = blocks("For programs that speak to OpenAI", "python")
    run_python(code, servers)
    assert "Paris" in capsys.readouterr().out


def test_the_python_clients_page(servers, capsys):
    page = (ROOT / "clients/python/README.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    run_python(code, servers)
    printed = capsys.readouterr().out
    streamed, cancelled, attached = re.split(r"(\[.*\])\nserving\n", printed)
    assert "Paris" in streamed
    assert "CANCELLED" in cancelled
    answer, _, rest = attached.partition(" ends with ")
    assert answer.endswith(rest.strip())
    assert 0 < len(rest.strip()) < len(answer)


@pytest.mark.parametrize(
    "page", ["README.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("clients/*/README.md"))]
)
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text()
    anchors = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) - anchors == set()
    for link in re.findall(r"\]\((?!#|http)([^)#]*)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link
