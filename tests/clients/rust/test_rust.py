"""The Rust client: built with Debian's crates, without a network, and read with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from clients.builds import ROOT, build_once, files_under
from clients.npm import run
from clients.program_checks import ProgramChecks
from clients.toolchains import need, need_file

pytestmark = pytest.mark.clients

CLIENT = ROOT / "clients" / "rust"
READER = ROOT / "tests" / "clients" / "rust" / "reader"
BUILD = ROOT / "build" / "rust"
# Sources are copied, so that no Cargo.lock and no target folder is made beside them.
COPY = BUILD / "sources"
TARGET = BUILD / "target"
REGISTRY = "/usr/share/cargo/registry"
CRATES = (
    *("base64-0.13", "bytes-1", "futures-core-0.3", "getrandom-0.2", "h2-0.3", "http-0.2"),
    *("percent-encoding-2", "prost-0.11", "prost-build-0.11", "tokio-1"),
)
OFFLINE = (
    *("--offline", "--quiet"),
    *("--config", 'source.crates-io.replace-with="debian"'),
    *("--config", f'source.debian.directory="{REGISTRY}"'),
)


@pytest.fixture(scope="module")
def cargo() -> None:
    """Cargo and the crates are there."""
    need("cargo", "cargo")
    for crate in CRATES:
        name = crate.rpartition("-")[0]
        found = sorted(Path(REGISTRY).glob(f"{crate}.*"))
        need_file(str(found[0] if found else f"{REGISTRY}/{crate}"), f"librust-{name}-dev")


def build(package: Path, *flags: str) -> None:
    """Into TARGET, from a copy in which only what differs is newer."""
    for source in files_under(CLIENT, READER):
        copy = COPY / source.relative_to(ROOT)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    env = {**os.environ, "CARGO_TARGET_DIR": str(TARGET), "CARGO_PROFILE_DEV_DEBUG": "0"}
    folder = COPY / package.relative_to(ROOT)
    run("cargo", "build", *flags, *OFFLINE, cwd=folder, env={**env, "RUSTFLAGS": "-Dwarnings"})


@pytest.fixture(scope="module")
def programs(cargo) -> Path:
    """The folder of the examples and the reader."""
    made = BUILD / "programs"

    def build_both() -> None:
        build(CLIENT, "--examples")
        build(READER)
        for name in ("chat", "cancel", "health", "attach"):
            shutil.copy(TARGET / "debug" / "examples" / name, made)
        shutil.copy(TARGET / "debug" / "reader", made)

    build_once(made, files_under(CLIENT, READER), [run("cargo", "--version")], build_both)
    return made


class TestRust(ProgramChecks):
    """What every client's programs must do."""


def test_the_messages_are_what_the_protos_say(cargo, tmp_path):
    need("protoc", "protobuf-compiler")
    made = BUILD / "codegen"

    def build_it() -> None:
        build(CLIENT / "codegen")
        shutil.copy(TARGET / "debug" / "slotwise-codegen", made)

    sources = files_under(CLIENT / "codegen", CLIENT / "Cargo.toml")
    build_once(made, sources, [run("cargo", "--version")], build_it)
    run(made / "slotwise-codegen", ROOT / "protos", ROOT / "clients" / "protos", tmp_path)
    names = ["slotwise.standard.rs", "slotwise.v1.rs"]
    assert sorted(one.name for one in tmp_path.iterdir()) == names
    for name in names:
        committed = CLIENT / "src" / "generated" / name
        assert committed.read_text() == (tmp_path / name).read_text(), "see clients/rust/README.md"


def test_the_sources_are_formatted():
    rustfmt = need("rustfmt", "rustfmt")
    sources = [one for one in files_under(CLIENT, READER) if one.suffix == ".rs"]
    # The generated ones are as prost makes them.
    sources = [one for one in sources if "generated" not in one.parts]
    assert len(sources) > 8
    flags = ("--check", "--edition", "2021", "--config-path", CLIENT)
    run(rustfmt, *flags, *sources)
