"""Gateways for the tests: the process, followed through its events, and what it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizer_files import QWEN3_TEMPLATE

from checkpoints import make_checkpoint

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60


@dataclass
class Gateway:
    """A running `python -m slotwise_gateway`: its address and what it printed."""

    process: subprocess.Popen[str]
    events: list[dict] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    url: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _readers: list[threading.Thread] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        """As the SDKs of OpenAI want it."""
        return f"{self.url}/v1"

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("/")[2].rpartition(":")
        return host, int(port)

    def wait_for_log(self, words: str) -> None:
        """Until a line of the log has these words."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: any(words in line for line in self.log), START_TIMEOUT_S
            )
        assert found, "".join(self.log)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Waits for its end; the exit status."""
        code = self.process.wait(STOP_TIMEOUT_S)
        for reader in self._readers:
            reader.join(10)
        return code

    def stop(self) -> None:
        """Twice the signal: what still runs does not matter to a test that has ended."""
        for _ in range(2):
            if self.process.poll() is None:
                self.terminate()
        try:
            self.end()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def _follow(self) -> None:
        for read in (self._read_events, self._read_log):
            self._readers.append(threading.Thread(target=read, daemon=True))
            self._readers[-1].start()
        with self._changed:
            self._changed.wait_for(lambda: self.url or self._has_ended(), START_TIMEOUT_S)
        assert self.url, "".join(self.log)[-4000:]

    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == "ready":
                    self.url = self.events[-1]["address"]
                self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self._changed.notify_all()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.log.append(line)
                self._changed.notify_all()


@contextlib.contextmanager
def running_gateway(
    server: str, *flags: str, port: int = 0, env: Mapping[str, str] | None = None
) -> Iterator[Gateway]:
    """A gateway to the gRPC server at `server`; it need not be there yet."""
    command = [sys.executable, "-m", "slotwise_gateway", "--server", server, "--events"]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        cwd="/",
    )
    gateway = Gateway(process)
    try:
        gateway._follow()
        yield gateway
    finally:
        gateway.stop()


@contextlib.asynccontextmanager
async def gateway_beside(
    server: str, *flags: str, port: int = 0, env: Mapping[str, str] | None = None
) -> AsyncIterator[Gateway]:
    """The same for a test whose event loop holds the server."""
    running = running_gateway(server, *flags, port=port, env=env)
    gateway = await asyncio.to_thread(running.__enter__)
    try:
        yield gateway
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


def make_chat_checkpoint(folder: Path) -> Path:
    """A small Qwen3 with random weights, whose template takes tools as Qwen3's does."""
    make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": QWEN3_TEMPLATE}))
    return folder
