"""The services of compose.yaml, run as a user runs them, and looked at from outside."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from compose.engine import Engine
from compose.images import ROOT
from free_ports import fixed_port

COMMAND_S = 600.0
_RETRY_S = 0.1
# Ends the program below docker-init, as a crash would; `docker kill` would be taken for a wish that
# the container does not come back.
_KILL = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    words = (folder / "cmdline").read_bytes().split(b"\\0")
    if words[1:3] == [b"-m", b"%s"]:
        os.kill(int(folder.name), signal.SIGKILL)
"""


@dataclass
class Stack:
    """One project of compose. `settings` are what a user would write to .env."""

    engine: Engine
    compose: Sequence[str]
    image: str
    name: str
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grpc_port = fixed_port()
        self.http_port = fixed_port(besides=self.grpc_port)

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def run(self, *words: str, check: bool = True, **settings: str) -> str:
        """What `docker compose WORDS` prints, on both streams."""
        done = subprocess.run(
            [*self.compose, *words],
            cwd=ROOT,
            env={
                **self.engine.environment,
                "COMPOSE_PROJECT_NAME": self.name,
                "SLOTWISE_IMAGE": self.image,
                "SLOTWISE_GRPC_PORT": str(self.grpc_port),
                "SLOTWISE_HTTP_PORT": str(self.http_port),
                **self.settings,
                **settings,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"compose {words}: {done.stdout}"
        return done.stdout

    def container(self, service: str) -> str:
        """The id of the service's container."""
        return self._list("ps", "-aq", "--filter", f"label=com.docker.compose.service={service}")[0]

    def inspect(self, service: str) -> dict:
        """All that Docker knows of the service's container."""
        return json.loads(self.engine.docker("inspect", self.container(service)))[0]

    def logs(self, service: str) -> str:
        return self.run("logs", "--no-color", service)

    def exec(self, service: str, *words: str, check: bool = True) -> str:
        return self.engine.docker("exec", self.container(service), *words, check=check)

    def kill(self, service: str, module: str) -> int:
        """Kills the service's program, `python -m MODULE`; how often the container was started
        anew before."""
        restarts = self.inspect(service)["RestartCount"]
        self.exec(service, "python", "-c", _KILL % module, check=False)
        return restarts

    def wait_restarted(self, service: str, restarts: int) -> None:
        """Waits until the container was started anew, one time more than so often."""
        deadline = time.monotonic() + COMMAND_S
        while True:
            found = self.inspect(service)
            if found["RestartCount"] > restarts and found["State"]["Running"]:
                return
            assert time.monotonic() < deadline, f"{service} was not started anew"
            time.sleep(_RETRY_S)

    def wait_health(self, service: str, state: str) -> None:
        """Waits until the health check of the service says so."""
        deadline = time.monotonic() + COMMAND_S
        while self.inspect(service)["State"]["Health"]["Status"] != state:
            assert time.monotonic() < deadline, self.inspect(service)["State"]["Health"]
            time.sleep(_RETRY_S)

    def left(self) -> dict[str, list[str]]:
        """What the engine has of this project, by kind."""
        kinds = {"containers": ("ps", "-aq"), "networks": ("network", "ls", "-q")}
        kinds["volumes"] = ("volume", "ls", "-q")
        return {kind: self._list(*words) for kind, words in kinds.items()}

    def _list(self, *words: str) -> list[str]:
        project = f"label=com.docker.compose.project={self.name}"
        return self.engine.docker(*words, "--filter", project).split()
