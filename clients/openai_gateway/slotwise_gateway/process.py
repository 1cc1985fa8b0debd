"""The life of the gateway's process: port, ready, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from typing import Final

import uvicorn

from .app import make_app
from .config import Config, ConfigError, is_loopback
from .connection import connection_class
from .gateway import Gateway

# For the last bytes of what is ended.
LAST_BYTES_S: Final = 2.0
BACKLOG: Final = 2048
# For what is open besides connections.
SPARE_FILES: Final = 64

log = logging.getLogger(__name__)


class Process:
    """Serves until a signal. The first SIGTERM or SIGINT drains, the second ends at once. SIGUSR1
    drains, SIGUSR2 ends at once, whatever came before: for who passes signals on that may have
    reached us too."""

    def __init__(self, config: Config) -> None:
        """Must be made on a running event loop."""
        self._config = config
        self._gateway = Gateway(config)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> None:
        """Returns when all has ended. ConfigError when it cannot start."""
        _check_tls(self._config)
        have_files_for(self._config.limits.max_connections)
        with self._signals(), _bound(self._config) as listener:
            server = self._server()
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            stopping = asyncio.create_task(self._stop.wait())
            try:
                starting = asyncio.create_task(server.is_listening.wait())
                await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
                starting.cancel()
                if not serving.done():
                    self._announce(listener)
                await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    await self._drain()
                server.should_exit = True
                await self._or_now(serving, LAST_BYTES_S)
                server.force_exit = True
                await serving
            finally:
                stopping.cancel()
                serving.cancel()
                await asyncio.gather(serving, stopping, return_exceptions=True)
            log.info("ended")

    def _server(self) -> _Server:
        config = self._config
        try:
            settings = uvicorn.Config(
                make_app(config, self._gateway),
                http=connection_class(config.limits, self._gateway.metrics.count_refusal),
                loop="none",
                ws="none",
                lifespan="on",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=round(config.limits.idle_s),
                ssl_certfile=config.https_cert and str(config.https_cert),
                ssl_keyfile=config.https_key and str(config.https_key),
            )
            settings.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--https-cert {config.https_cert} with --https-key {config.https_key} cannot be "
                f"used: {error}"
            ) from error
        return _Server(settings)

    def _announce(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        scheme = "https" if self._config.https_cert else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if not is_loopback(self._config.host) and not self._config.https_cert:
            log.warning(
                "%s is open to networks without TLS: what is asked and answered can be read on the "
                "way; give --https-cert and --https-key, or put a proxy before it",
                self._config.host,
            )
        if not self._config.may_send_tokens:
            log.warning(
                "callers' tokens are not passed on: the way to %s is not encrypted; give --tls-ca, "
                "or --insecure-tokens where the network is trusted",
                self._config.server,
            )
        self._tell(event="ready", address=address, server=self._config.server)
        log.info("listening on %s, for the gRPC server at %s", address, self._config.server)

    async def _drain(self) -> None:
        self._gateway.drain()
        log.info("draining: running requests may take %g s more", self._config.grace_s)
        if not await self._or_now(self._gateway.wait_idle(), self._config.grace_s):
            self._gateway.end_runs()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gateway.wait_idle(), LAST_BYTES_S)

    async def _or_now(self, work: object, seconds: float) -> bool:
        """Waits for the work, so long at most, or until all is to end; True when it is done."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        now = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait([task, now], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        return bool(task.done())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: self._on_signal,
            signal.SIGINT: self._on_signal,
            signal.SIGUSR1: self._stop.set,
            signal.SIGUSR2: self._end_now,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _end_now(self) -> None:
        self._stop.set()
        self._stop_now.set()

    def _tell(self, **event: object) -> None:
        """One JSON line on standard output, for whoever started the process with --events."""
        if self._config.events:
            with contextlib.suppress(BrokenPipeError):  # the reader is gone; serving goes on
                print(json.dumps(event), file=sys.stdout, flush=True)


class _Server(uvicorn.Server):
    """Leaves signals to the process, and tells when it listens."""

    def __init__(self, settings: uvicorn.Config) -> None:
        super().__init__(settings)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def have_files_for(num_connections: int) -> None:
    """Raises the process's limit of open files as far as it may; a warning where that is too low:
    connections beyond it would end without a word."""
    wanted = num_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        log.warning(
            "the process may open %d files, too few for %d connections: raise the limit "
            "(ulimit -n), or lower --max-connections",
            hard,
            num_connections,
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_tls(config: Config) -> None:
    """ConfigError for files of which gRPC would only say that there is no connection."""
    try:
        if config.tls is not None:
            config.tls.credentials()
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


@contextlib.contextmanager
def _bound(config: Config) -> Iterator[socket.socket]:
    """The port, taken. ConfigError when it cannot be."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    host = config.host.strip("[]")
    try:
        listener = socket.create_server((host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        # Python says in some of its words what is said here.
        is_name = isinstance(error, socket.gaierror)
        reason = error.strerror if is_name else os.strerror(error.errno or 0)
        is_taken = not is_name and error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "; another --port may be free, 0 takes one" if is_taken else ""
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {reason}{advice}"
        ) from error
    with listener:
        yield listener
