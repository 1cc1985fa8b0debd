"""A Docker engine for the tests: the one that answers, or one of their own that ends with them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_S = 60.0
STOP_S = 30.0
_RETRY_S = 0.1
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


class NoEngineError(Exception):
    """None answers, and none of our own can run on this machine; the message says why."""


@dataclass(frozen=True)
class Engine:
    """Where an engine listens, and whether the tests started it."""

    host: str
    is_own: bool

    @property
    def environment(self) -> dict[str, str]:
        """For programs that talk to it; nothing of ours comes from the caller's variables."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLOTWISE_", "COMPOSE_", "DOCKER_", "PIP_"))
        }
        return {**kept, "DOCKER_HOST": self.host}

    def docker(self, *words: str, timeout: float = 600.0, check: bool = True) -> str:
        """What `docker WORDS` prints, without the blanks around it."""
        done = subprocess.run(
            ["docker", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0 or not check, f"docker {words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()


@contextlib.contextmanager
def running_engine(data: Path) -> Iterator[Engine]:
    """The engine that DOCKER_HOST or the usual socket leads to; else one of our own, which keeps
    its images in `data`. NoEngineError."""
    usual = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if _answers(usual):
        yield Engine(usual, is_own=False)
        return
    if os.geteuid() != 0:
        raise NoEngineError(f"no Docker engine answers at {usual}, and only root can start one")
    with (
        _alone(),
        _kept_network(),
        tempfile.TemporaryDirectory(prefix="slotwise-docker-") as folder,
        _own_engine(data, Path(folder)) as engine,
    ):
        yield engine


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One such engine at a time on a machine, the next one waits: at its end the first would take
    away the other's rules of the network."""
    program = shutil.which("dockerd")
    assert program is not None
    lock = os.open(program, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _own_engine(data: Path, folder: Path) -> Iterator[Engine]:
    data.mkdir(parents=True, exist_ok=True)
    engine = Engine(f"unix://{folder}/docker.sock", is_own=True)
    # It ends with us, however we end.
    command = ["setpriv", "--pdeathsig", "TERM", "dockerd"]
    command += ["--host", engine.host, "--data-root", str(data)]
    command += ["--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    log = folder / "log"
    with log.open("w") as output:
        # In a session of its own: Ctrl-C is for the tests, which then end it in order.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(engine.host):
            if process.poll() is not None or time.monotonic() > deadline:
                (last,) = log.read_text().splitlines()[-1:] or [f"silent for {START_S:g} s"]
                raise NoEngineError(f"dockerd does not start on this machine: {last}")
            time.sleep(_RETRY_S)
        yield engine
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for mount in _mounts_under(folder):
            subprocess.run(["umount", mount], check=False)


def _mounts_under(folder: Path) -> list[str]:
    """What dockerd leaves mounted, such as its namespace of networks."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [mount for mount in reversed(mounts) if mount.startswith(f"{folder}/")]


def _answers(host: str) -> bool:
    done = subprocess.run(
        ["docker", "--host", host, "version", "--format", "{{.Server.Version}}"],
        capture_output=True,
        timeout=START_S,
        check=False,
    )
    return done.returncode == 0


@contextlib.contextmanager
def _kept_network() -> Iterator[None]:
    """dockerd leaves its bridge, its rules and the forwarding of packets behind; what was not there
    before is taken away."""
    forwarding = _FORWARDING.read_text()
    rules = _output("iptables-save")
    had_bridge = "docker0" in _output("ip", "-o", "link")
    try:
        yield
    finally:
        if "DOCKER" not in rules:
            subprocess.run(["iptables-restore"], input=rules, text=True, check=False)
            for table in {"filter", "nat"} - {line[1:] for line in rules.splitlines()}:
                subprocess.run(["iptables", "-t", table, "-F"], check=False)
                subprocess.run(["iptables", "-t", table, "-X"], check=False)
            if "*filter" not in rules:
                subprocess.run(["iptables", "-P", "FORWARD", "ACCEPT"], check=False)
        if not had_bridge:
            subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True, check=False)
        _FORWARDING.write_text(forwarding)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compose_command() -> list[str] | None:
    """`docker compose` or `docker-compose`, whichever is there."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        with contextlib.suppress(OSError):
            done = subprocess.run([*command, "version"], capture_output=True, check=False)
            if done.returncode == 0:
                return command
    return None
