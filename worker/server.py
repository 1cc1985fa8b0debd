"""The gRPC face of a rank: the Run stream, health, reflection.

The pipeline's threads run everything that takes time (setting up, steps); the event loop only
moves messages, so health answers at once whatever the load. Protobuf types stay in this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from slotwise.v1 import inference_pb2
from slotwise.worker.v1 import worker_pb2, worker_pb2_grpc
from worker import device
from worker.batch import (
    DecodeRow,
    LogitAdjustment,
    PrefillChunk,
    Prefix,
    Row,
    SlotSetup,
    StepCommand,
    StepResult,
    TokenLogprobs,
)
from worker.config import GRPC_OPTIONS, RELEASE_TIMEOUT_S, TlsFiles
from worker.errors import ProtocolError, WorkerError
from worker.pipeline import Pipeline
from worker.rank import Rank, RankInfo, RankSetup
from worker.self_test import PrefixReuse
from worker.tls import server_credentials

_LOG = logging.getLogger(__name__)
_PROGRESS_INTERVAL_S = 0.25
# How long a new stream waits for the last one's end: they come by connections of their own.
_LAST_END_S = 1.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_PREFIX_REUSE = {
    PrefixReuse.NONE: worker_pb2.PREFIX_REUSE_NONE,
    PrefixReuse.PREFILL: worker_pb2.PREFIX_REUSE_PREFILL,
    PrefixReuse.ALL: worker_pb2.PREFIX_REUSE_ALL,
}
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves one Run stream at a time with the rank it owns.

    `on_stuck(message)` is called when a step does not end although its stream has, or the device
    has failed; it should end the process, for nothing else frees the thread or the device.
    """

    def __init__(
        self,
        rank: Rank,
        health: health_aio.HealthServicer,
        on_stuck: Callable[[str], None],
        release_timeout_s: float,
    ) -> None:
        self._rank = rank
        self._health = health
        self._on_stuck = on_stuck
        self._release_timeout_s = release_timeout_s
        self._pipeline = Pipeline()
        # No stream is open.
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._releasing: asyncio.Task[None] | None = None

    async def Run(  # noqa: N802 (the name in worker.proto)
        self, _requests: object, context: grpc.aio.ServicerContext
    ) -> None:
        """See worker.proto."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_END_S):
                await self._idle.wait()
        if self._is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")
        if not self._idle.is_set():
            await context.abort(
                grpc.StatusCode.ALREADY_EXISTS, "another stream is open; a worker serves one"
            )
        self._idle.clear()
        ended = threading.Event()
        name: str | None = None
        info: RankInfo | None = None
        try:
            await self._released()
            setup = _rank_setup(await context.read())
            name = f"slotwise.worker/{setup.rank}"
            await self._health.set(name, _NOT_SERVING)
            info = await self._configure(setup, context, ended)
            # All that is here stays until the release, and costs the collector 0.1 s at a time.
            gc.freeze()
            await context.write(worker_pb2.RunResponse(configured=_configured(info)))
            await self._run_steps(name, setup.rank, context)
        except WorkerError as error:
            # Of a set-up that fails the scheduler tells; it gets the words.
            level = logging.INFO if info is None else logging.ERROR
            _LOG.log(level, "stream ended: %s", error)
            await context.abort(grpc.StatusCode[error.status], str(error))
        except DecodeError as error:
            words = f"what came is no message: {error}"
            _LOG.error("stream ended: %s", words)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, words)
        except grpc.aio.BaseError as error:
            _LOG.info("the scheduler went away: %s", error)
        except Exception as error:
            _LOG.exception("stream ended by a bug")
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            ended.set()
            self._releasing = asyncio.create_task(self._release(name))
            self._idle.set()

    async def drain(self) -> None:
        """Takes no new stream and waits for the end of the one that is open."""
        self._is_draining = True
        if not self._idle.is_set():
            _LOG.info("waiting for the scheduler to end its stream")
        await self._idle.wait()

    async def close(self) -> None:
        """Waits until the last stream has ended and its slots are dropped, then ends the step
        thread. The server is to be stopped before: it ends the stream."""
        self._is_draining = True
        await self._idle.wait()
        await self._released()
        self._pipeline.shutdown()

    async def _configure(
        self, setup: RankSetup, context: grpc.aio.ServicerContext, ended: threading.Event
    ) -> RankInfo:
        progress = worker_pb2.LoadProgress(stage="starting")

        def on_progress(stage: str, done: int, total: int) -> None:
            nonlocal progress
            progress = worker_pb2.LoadProgress(stage=stage, done_bytes=done, total_bytes=total)

        future = asyncio.wrap_future(
            self._pipeline.call(self._rank.configure, setup, on_progress, ended.is_set)
        )
        # A cancelled stream does not wait for the outcome; then nobody asks for the exception.
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        while not future.done():
            await context.write(worker_pb2.RunResponse(load_progress=progress))
            await asyncio.wait({future}, timeout=_PROGRESS_INTERVAL_S)
        return future.result()

    async def _run_steps(self, name: str, rank: int, context: grpc.aio.ServicerContext) -> None:
        """Answers each command, in order. Commands go to the thread as they come: no idle gap."""
        pending: asyncio.Queue[Future[StepResult] | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read_commands(context, pending))
        first = True
        try:
            while (future := await pending.get()) is not None:
                result = await asyncio.wrap_future(future)
                await context.write(
                    worker_pb2.RunResponse(step_result=_step_result(result, rank == 0))
                )
                if first:
                    await self._health.set(name, _SERVING)
                    first = False
            # How the stream ended is what reading it says.
            await reader
        finally:
            reader.cancel()
            while not pending.empty():
                if (left := pending.get_nowait()) is not None:
                    left.cancel()

    async def _read_commands(
        self,
        context: grpc.aio.ServicerContext,
        pending: asyncio.Queue[Future[StepResult] | None],
    ) -> None:
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                pending.put_nowait(self._submit(request))
        finally:
            pending.put_nowait(None)

    def _submit(self, request: worker_pb2.RunRequest) -> Future[StepResult]:
        # Read on the step thread, which has to wake up meanwhile anyhow.
        return self._pipeline.run(lambda: (self._rank.executor, _step_command(request)))

    async def _release(self, name: str | None) -> None:
        """Drops the slots once the thread is free, which no longer waits for peers.

        A lone rank's step always ends; one in a group that does not, ends the process.
        """
        # It may take NCCL some time.
        await asyncio.to_thread(self._rank.abort)
        if name is not None:
            await self._health.set(name, _NOT_SERVING)
        gc.unfreeze()
        released = asyncio.wrap_future(self._pipeline.call(self._rank.release))
        limit_s = self._release_timeout_s if self._rank.waits_for_peers else None
        done, _ = await asyncio.wait({released}, timeout=limit_s)
        if not done:
            self._on_stuck(
                f"a step still runs {self._release_timeout_s:g} s after its stream ended"
            )
        elif error := released.exception():
            # A GPU that has failed once fails for ever in this process.
            self._on_stuck(f"the device cannot be used any more: {error}")

    async def _released(self) -> None:
        if self._releasing is not None:
            await self._releasing


async def start_server(
    listen: str,
    rank: Rank,
    on_stuck: Callable[[str], None],
    release_timeout_s: float = RELEASE_TIMEOUT_S,
    tls: TlsFiles | None = None,
) -> tuple[grpc.aio.Server, WorkerServicer, str]:
    """Binds `listen` and serves; the third value is the address with the port really taken.

    Raises OSError when the address is in use or cannot be bound, ValueError when the TLS files are
    not good.
    """
    credentials = server_credentials(tls) if tls else None
    device.refuse_live_socket(listen)
    server = grpc.aio.server(options=GRPC_OPTIONS)
    health = health_aio.HealthServicer()
    servicer = WorkerServicer(rank, health, on_stuck, release_timeout_s)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (
        worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: in use or not permitted") from error
    await server.start()
    await health.set("", _SERVING)
    bound = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    return server, servicer, bound


def _rank_setup(request: object) -> RankSetup:
    if not isinstance(request, worker_pb2.RunRequest) or not request.HasField("configure"):
        raise ProtocolError("the first message of a stream must be Configure")
    message = request.configure
    if message.epoch < 1 or message.world_size < 1:
        raise ProtocolError(
            f"Configure: epoch {message.epoch} and world_size {message.world_size} start at 1"
        )
    return RankSetup(
        epoch=message.epoch,
        rank=message.rank,
        world_size=message.world_size,
        rendezvous_address=message.rendezvous_address,
        num_slots=message.num_slots,
        max_seq_len=message.max_seq_len,
        weight_dtype=message.weight_dtype or "auto",
        kv_dtype=message.kv_dtype or "auto",
        max_step_tokens=message.max_step_tokens,
        max_running=message.max_running,
    )


def _step_command(request: worker_pb2.RunRequest) -> StepCommand:
    if not request.HasField("step"):
        raise ProtocolError("after Configure a stream carries only steps")
    step = request.step
    return StepCommand(
        epoch=step.epoch,
        step_id=step.step_id,
        num_steps=step.num_steps,
        rows=tuple(_row(row) for row in step.rows),
    )


def _row(row: worker_pb2.Row) -> Row:
    work = row.WhichOneof("work")
    if work == "decode":
        return DecodeRow(row.slot, row.generation, row.allowed_tokens)
    if work == "prefill":
        chunk = row.prefill
        return PrefillChunk(
            slot=row.slot,
            generation=row.generation,
            start=chunk.start,
            token_ids=tuple(chunk.token_ids[:]),
            sample=chunk.sample,
            setup=_slot_setup(chunk.setup) if chunk.HasField("setup") else None,
            prefix=_prefix(chunk.prefix) if chunk.HasField("prefix") else None,
            next_token_id=chunk.next_token_id if chunk.HasField("next_token_id") else -1,
            allowed_tokens=row.allowed_tokens,
        )
    raise ProtocolError(f"the row of slot {row.slot} has neither prefill nor decode")


def _prefix(prefix: worker_pb2.Prefix) -> Prefix:
    return Prefix(prefix.source_slot, prefix.source_generation, prefix.length)


def _slot_setup(setup: worker_pb2.SlotSetup) -> SlotSetup:
    return SlotSetup(
        temperature=setup.temperature,
        top_p=setup.top_p,
        top_k=setup.top_k,
        min_p=setup.min_p,
        seed=setup.seed,
        end_token_ids=tuple(setup.end_token_ids),
        max_len=setup.max_len,
        num_logprobs=setup.num_logprobs if setup.HasField("num_logprobs") else -1,
        num_prompt_logprobs=(
            setup.num_prompt_logprobs if setup.HasField("num_prompt_logprobs") else -1
        ),
        decode_row=setup.decode_row,
        masked=setup.masked,
        adjustment=_adjustment(setup.adjustment) if setup.HasField("adjustment") else None,
    )


def _adjustment(message: worker_pb2.LogitAdjustment) -> LogitAdjustment:
    if len(message.bias_token_ids) != len(message.biases):
        raise ProtocolError(
            f"{len(message.bias_token_ids)} bias_token_ids and {len(message.biases)} biases"
        )
    return LogitAdjustment(
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty,
        prompt_token_ids=tuple(message.prompt_token_ids[:]),
        generated_token_ids=tuple(message.generated_token_ids[:]),
        biases=tuple(zip(message.bias_token_ids, message.biases, strict=True)),
        min_len=message.min_len,
    )


def _configured(info: RankInfo) -> worker_pb2.Configured:
    return worker_pb2.Configured(
        epoch=info.epoch,
        rank=info.rank,
        num_slots=info.limits.num_slots,
        max_seq_len=info.limits.max_seq_len,
        num_layers=info.num_layers,
        vocab_size=info.vocab_size,
        fingerprint=info.fingerprint,
        weight_dtype=info.limits.weight_dtype,
        kv_dtype=info.limits.kv_dtype,
        device=info.device,
        predicted_memory_bytes=info.plan.predicted_bytes,
        measured_memory_bytes=info.measured_bytes,
        device_memory_bytes=info.plan.total_bytes,
        self_tests=[
            inference_pb2.SelfTest(name=test.name, passed=test.passed, detail=test.detail)
            for test in info.self_tests
        ],
        num_threads=info.num_threads,
        max_step_tokens=info.limits.max_step_tokens,
        max_mixed_step_tokens=info.pace.max_mixed_step_tokens,
        run_ahead_window_ns=info.pace.run_ahead_window_ns,
        max_running=info.limits.max_running,
        max_logprobs_steps=info.max_logprobs_steps,
        prefix_reuse=_PREFIX_REUSE[info.prefix_reuse],
        device_name=info.device_name,
        build=info.build,
    )


def _step_result(result: StepResult, with_rows: bool) -> worker_pb2.StepResult:
    message = worker_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        digest=result.digest,
        duration_ns=result.duration_ns,
    )
    for row in result.rows if with_rows else ():
        message.rows.add(
            slot=row.slot,
            generation=row.generation,
            token_ids=row.token_ids,
            corrupted=row.corrupted,
            logprobs=[_token_logprobs(token) for token in row.logprobs],
            prompt_logprobs=[_token_logprobs(token) for token in row.prompt_logprobs],
        )
    return message


def _token_logprobs(token: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        logprob=token.logprob,
        rank=token.rank,
        best_token_ids=token.best_token_ids,
        best_logprobs=token.best_logprobs,
    )
