"""The project's image for the tests, and the base image that it is built from: Debian with the
wheels that pip finds on this machine, so that a build in a container finds them too."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compose.engine import Engine

from slotwise_cli.demo_model import REQUIREMENT

ROOT = Path(__file__).parents[2]
NAME = "slotwise-compose-test"
SUITE = "bookworm"
# Its Python.
PYTHON = "3.11"
PACKAGES = "python3,python3-venv,ca-certificates"
PULL_S = 60.0
PREPARE_S = 600.0
BUILD_S = 1800.0


def build_base(engine: Engine) -> str:
    """The base image's name; made when the engine has none for these requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
        "cmake>=3.26",
        "ninja",
    ]
    names = {re.match(r"[\w.-]*", line)[0] for line in needed}
    constraints = (ROOT / "constraints-dev.txt").read_text().splitlines()
    held = [line for line in constraints if line.partition("==")[0] in names]
    told = "\n".join([SUITE, PACKAGES, REQUIREMENT, *needed, *held])
    image = f"{NAME}:base-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    if engine.docker("images", "-q", image):
        return image
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        debian = pool.submit(_debian, engine, folder / "debian")
        wheels = pool.submit(_download, needed, folder / "wheels")
        wheels.result()
        pip = "[global]\nno-index = true\nfind-links = /wheels\n"
        (folder / "pip.conf").write_text(pip)
        recipe = f"FROM {debian.result()}\nCOPY wheels /wheels\nCOPY pip.conf /etc/pip.conf\n"
        (folder / "Dockerfile").write_text(recipe)
        (folder / ".dockerignore").write_text("debian\n")
        engine.docker("build", "-q", "-t", image, name, timeout=PREPARE_S)
    names = engine.docker("images", f"{NAME}:base-*", "--format", "{{.Repository}}:{{.Tag}}")
    for old in set(names.split()) - {image}:
        engine.docker("rmi", old)
    return image


def build(engine: Engine, compose: Sequence[str], base: str) -> str:
    """The project's image, as it is built now. What did not change is taken from the last time."""
    image = f"{NAME}:cpu"
    settings = {"SLOTWISE_BASE_IMAGE": base, "SLOTWISE_BUILD_IMAGE": base, "SLOTWISE_IMAGE": image}
    done = subprocess.run(
        [*compose, "build", "prepare"],
        cwd=ROOT,
        env={**engine.environment, **settings},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    # Named, so that it stays for the next build: the compiler, and the native library.
    words = ["--target", "project", "--build-arg", f"BASE_IMAGE={base}"]
    words += ["--build-arg", f"BUILD_IMAGE={base}"]
    engine.docker("build", "-q", "-t", f"{NAME}:project", *words, str(ROOT), timeout=BUILD_S)
    return image


def _debian(engine: Engine, folder: Path) -> str:
    """As pulled; made with debootstrap where it cannot be."""
    pulled = f"debian:{SUITE}-slim"
    try:
        engine.docker("pull", "-q", pulled, timeout=PULL_S)
        return pulled
    except (AssertionError, subprocess.TimeoutExpired):
        image = f"{NAME}:debian"
    if engine.docker("images", "-q", image):
        return image
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(folder)]
    _run(command)
    for left in ("var/cache/apt/archives", "var/lib/apt/lists"):
        _run(["find", str(folder / left), "-type", "f", "-delete"])
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(
            ["docker", "import", "-", image],
            stdin=tar.stdout,
            env=engine.environment,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=PREPARE_S,
        )
    assert tar.returncode == 0
    return image


def _download(needed: list[str], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--dest", str(folder)]
    binary = ["--only-binary=:all:", "--python-version", PYTHON]
    _run([*pip, *binary, "-c", str(ROOT / "constraints-dev.txt"), *needed])
    _run([*pip, "--only-binary=:all:", "--no-deps", REQUIREMENT])


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PREPARE_S, check=False, cwd="/"
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
