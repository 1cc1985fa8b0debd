"""Commands and flags that the pages name, beside those that there are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache

import typer
from docs.blocks import ROOT, blocks_of, spans_of

from slotwise_cli.__main__ import build_app

# Not where it names a namespace, a folder, a host.
COMMAND = re.compile(r"(?<![\w./\-\[:=])(?<!-n )slotwise ([a-z][^\n|;&)#>]*)")
MAKE = re.compile(r"(?:^|(?<=[\s;&`(]))make ((?:[a-z][\w-]*|\w+=\S+)(?: [a-z][\w-]*(?!=))*)")


# Flags of nvcc, Docker and cargo that the pages name by themselves.
FOREIGN = {"--fmad", "--profile", "--offline"}


@cache
def commands() -> object:
    return typer.main.get_command(build_app())


def flags_of(command: object) -> set[str]:
    own = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    return own | {"--help", "--version"}


@cache
def all_flags() -> set[str]:
    """Of any program of ours: slotwise's, those of the services themselves, those of tests."""
    found: set[str] = set()
    todo = [commands()]
    while todo:
        command = todo.pop()
        found |= flags_of(command)
        todo += getattr(command, "commands", {}).values()
    for path in (*ROOT.glob("[sw]*/config.py"), *ROOT.glob("clients/openai_gateway/*/config.py")):
        found |= set(re.findall(r'"(--[a-z][\w-]*)"', path.read_text()))
    for folder in ("clients/openai_gateway", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r'add_argument\(\s*"(--[a-z][\w-]*)"', path.read_text()))
    return found | FOREIGN


def shell_of(text: str, page: str) -> Iterator[str]:
    """Lines of shell blocks, a line that goes on joined."""
    for block in blocks_of(text, page):
        if block.language == "sh":
            joined = re.sub(r"\\\n *", "", block.code)
            yield from (line for line in joined.splitlines() if not line.startswith("#"))


def faults(text: str, page: str) -> list[str]:
    """Each command, flag and word of make that there is none of."""
    shell = list(shell_of(text, page))
    found = [fault for code in shell for fault in _usage_faults(code)]
    for code in (*spans_of(text), *shell):
        for match in COMMAND.finditer(code):
            found += _faults_of_command(match[0])
        for match in MAKE.finditer(code):
            found += [f"make {word}" for word in match[1].split() if not _is_made(word)]
        if re.match(r"--\w", code) and not _is_flag(re.split("[ =]", code)[0]):
            found.append(code)
    return found


def _is_flag(word: str) -> bool:
    """`--tls-*` stands for several."""
    if word.endswith("*"):
        return any(flag.startswith(word[:-1]) for flag in all_flags())
    return word in all_flags()


def _usage_faults(code: str) -> Iterator[str]:
    """Of whole commands: an argument that is missing, a value that cannot be."""
    for match in COMMAND.finditer(code):
        try:
            words = shlex.split(match[0], comments=True)[1:]
        except ValueError:
            continue
        command = commands()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if hasattr(command, "commands") or "--help" in words:
            continue
        try:
            command.make_context(command.name, words)
        except Exception as error:
            # typer's copy of click, whose place depends on the release; flags are looked at below.
            said = getattr(error, "format_message", None)
            if said is None:
                raise
            if "No such option" not in said():
                yield f"{match[0].strip()}: {said()}"


def _faults_of_command(text: str) -> Iterator[str]:
    try:
        words = shlex.split(text, comments=True)[1:]
    except ValueError:
        # A quote goes on in the next line; flags stand before it.
        words = text.split("'")[0].split('"')[0].split()[1:]
    command = commands()
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands") and not (words and words[0].startswith("-")):
        # A group may be named by itself, a command of it must be there.
        if words or command is commands():
            yield text
        return
    for word in words:
        if re.match(r"--[a-z]", word) and word.partition("=")[0] not in flags_of(command):
            yield f"{text.strip()}: {word}"


@cache
def _made() -> set[str]:
    return set(re.findall(r"^([a-z][\w -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _is_made(word: str) -> bool:
    return "=" in word or any(word in names.split() for names in _made())
