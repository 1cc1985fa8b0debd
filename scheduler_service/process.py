"""The life of the scheduler process: port, model, workers, ready, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import TYPE_CHECKING

import grpc

from .auth import Callers, Gate
from .config import Config, ConfigError, is_loopback
from .engine import Engine
from .engine_types import EngineState, LoadProgress
from .health import HealthService
from .journal import Journal, JournalError, RecordedCall
from .listener import bind, make_server
from .metrics import Metrics
from .metrics_port import metrics_port
from .server import add_inference, resume_calls
from .service import InferenceService, Survival, load_model
from .tls import server_credentials
from .worker_pool import warn_of_plain_links

if TYPE_CHECKING:
    from .tracing import Tracer

# After the last request has ended: time for its last message to reach a slow client.
LAST_MESSAGES_S = 2.0

log = logging.getLogger(__name__)


class Process:
    """Serves until a signal. The first SIGTERM or SIGINT drains, the second ends at once. SIGUSR1
    drains, SIGUSR2 ends at once, whatever came before: for who passes signals on that may have
    reached us too."""

    def __init__(self, config: Config) -> None:
        """Must be made on a running event loop. ConfigError when the token file is not good."""
        self._config = config
        self._callers = Callers(config.access.tokens)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._has_signal = False
        self._is_open = False
        self._at_end = contextlib.ExitStack()
        self._health = HealthService(config.engine.world_size)
        self._metrics = Metrics()
        self._tracer = _tracer(config)
        if self._tracer is not None:
            self._at_end.callback(self._tracer.close)
        steps = self._tracer
        self._engine = Engine(config.engine, self._on_state, self._on_progress, steps=steps)

    async def run(self) -> None:
        """Returns when all has ended. ConfigError, ModelFilesError or EngineFailedError when the
        service cannot start."""
        with self._signals():
            access = self._config.access
            gate = None
            if self._callers.wants_tokens or not access.operator_calls:
                gate = Gate(self._callers, operator_calls=access.operator_calls)
            server = make_server(self._health, gate, with_reflection=access.reflection)
            self._warn_of_open_ports()
            credentials = server_credentials(access.tls) if access.tls else None
            address = await bind(server, self._config.host, self._config.port, credentials)
            try:
                async with self._metrics_port():
                    await self._serve(server, address)
            finally:
                await self._engine.stop()
                self._health.close()
                await server.stop(None)
                self._at_end.close()

    @contextlib.asynccontextmanager
    async def _metrics_port(self) -> AsyncIterator[None]:
        host, port = self._config.metrics_host, self._config.metrics_port
        if port is None:
            yield
            return
        async with metrics_port(host, port, self._metrics.text) as address:
            log.info("metrics on http://%s/metrics", address)
            yield

    async def _serve(self, server: grpc.aio.Server, address: str) -> None:
        # The workers meanwhile: both take seconds.
        starting = asyncio.create_task(self._engine.start())
        try:
            service, recorded = await self._load(server)
            log.info("listening on %s; loading %s", address, self._config.model_dir)
            if not await self._or_stop(starting, self._stop):
                log.info("told to end before the workers were ready")
                return
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        service.check_workers()
        await resume_calls(service, recorded)
        self._is_open = True
        self._health.on_state(self._engine.state)
        # All that is here stays, and one collection of it would hold every request up for 15 ms.
        gc.collect()
        gc.freeze()
        name = service.model.info.name
        self._tell(event="ready", address=address, **self._facts(name))
        log.info("ready: %s on %s", name, address)
        await self._stop.wait()
        log.info("draining: running requests may take %g s more", self._config.grace_s)
        await self._or_stop(self._drain(server, service), self._stop_now)
        log.info("ended")

    async def _load(self, server: grpc.aio.Server) -> tuple[InferenceService, list[RecordedCall]]:
        """Reads what is on disk and begins to listen; what the journal has left goes with it."""
        model = await asyncio.to_thread(
            load_model, self._config.model_dir, self._config.served_name
        )
        self._at_end.callback(model.constraints.close)
        for setting in model.info.unapplied:
            log.warning("generation_config.json asks for %s; it is not applied", setting)
        if model.constraints.refusal:
            log.warning("constraints are refused for this model: %s", model.constraints.refusal)
        survival, recorded = await self._survival()
        service = InferenceService(model, self._engine, survival, is_open=False)
        self._at_end.callback(service.calls.close)
        add_inference(
            server, service, self._config.engine, self._callers, self._metrics, self._tracer
        )
        await server.start()
        return service, recorded

    def _facts(self, model: str) -> dict[str, object]:
        """For the line of whoever started the process, who may have no way to call the port."""
        info = self._engine.info()
        return {
            "model": model,
            "num_slots": info.geometry.num_slots,
            "max_running": info.geometry.max_running,
            "max_seq_len": info.geometry.max_seq_len,
            "device": info.workers[0].device,
            "weight_dtype": info.geometry.weight_dtype,
            "kv_dtype": info.geometry.kv_dtype,
            "tp": len(info.workers),
        }

    def _warn_of_open_ports(self) -> None:
        config = self._config
        access = config.access
        if not is_loopback(config.host) and not access.tls:
            log.warning(
                "%s is open to networks without TLS: what is asked and answered can be read on the "
                "way; give --tls-cert and --tls-key",
                config.host,
            )
        if not is_loopback(config.host) and not access.tokens and not access.has_client_ca:
            log.warning(
                "%s is open to networks and nobody is asked who he is; give --tokens or "
                "--tls-client-ca",
                config.host,
            )
        if config.engine.workers_tls is None:
            warn_of_plain_links(config.engine.worker_addresses)

    async def _survival(self) -> tuple[Survival, list[RecordedCall]]:
        """What is kept of calls, and what a former life of the server has left."""
        keeping = self._config.keeping
        journal, recorded = None, list[RecordedCall]()
        if keeping.journal is not None:
            try:
                journal, recorded = await asyncio.to_thread(
                    Journal.open,
                    keeping.journal,
                    max_bytes=keeping.journal_max_bytes,
                    retention_s=keeping.retention_s,
                )
            except JournalError as error:
                raise ConfigError(str(error)) from error
            self._at_end.callback(journal.close)
        survival = Survival(
            journal=journal,
            retention_s=keeping.retention_s,
            max_window_s=keeping.max_window_s,
            slow_reader_s=keeping.slow_reader_s,
        )
        return survival, recorded

    async def _drain(self, server: grpc.aio.Server, service: InferenceService) -> None:
        # Whose constraint is not compiled yet would be refused after that.
        service.model.constraints.stop()
        service.calls.stop()
        await self._engine.drain(self._config.grace_s)
        self._health.close()
        await server.stop(LAST_MESSAGES_S)

    async def _or_stop(self, work: Awaitable[None], stop: asyncio.Event) -> bool:
        """Runs the work until it ends or `stop` is set; True when it ended by itself."""
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            for future in (task, waiter):
                future.cancel()
            await asyncio.gather(task, waiter, return_exceptions=True)

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
        if self._has_signal:
            self._stop_now.set()
        self._has_signal = True
        self._stop.set()

    def _end_now(self) -> None:
        self._stop.set()
        self._stop_now.set()

    def _on_state(self, state: EngineState) -> None:
        log.info("engine: %s", state.value)
        if self._tracer is not None:
            self._tracer.on_state(state)
        # Not before what a former life has left goes on: it would be asked for at once.
        if self._is_open or state is not EngineState.READY:
            self._health.on_state(state)

    def _on_progress(self, progress: LoadProgress) -> None:
        self._tell(
            event="loading",
            rank=progress.rank,
            stage=progress.stage,
            done=progress.done_bytes,
            total=progress.total_bytes,
        )

    def _tell(self, **event: object) -> None:
        """One JSON line on standard output, for whoever started the process with --events."""
        if self._config.events:
            with contextlib.suppress(BrokenPipeError):  # the reader is gone; serving goes on
                print(json.dumps(event), file=sys.stdout, flush=True)


def _tracer(config: Config) -> Tracer | None:
    """None where no collector is named. ConfigError without the extra that it needs."""
    if not config.otlp_endpoint:
        return None
    try:
        from .tracing import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint needs {error.name}, which is not installed: "
            "pip install 'slotwise[trace]'"
        ) from error
    name = config.served_name or config.model_dir.resolve().name
    return Tracer(config.otlp_endpoint, config.trace_sample_ratio, name)
