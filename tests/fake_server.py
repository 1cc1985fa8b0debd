"""A gRPC worker that runs a FakeWorker, and misbehaves when told to.

As a program (`python fake_server.py --listen unix:/path.sock`) it stands in for `python -m worker`.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from fake_worker import FakeWorker, ProtocolViolation, Script

from scheduler_service.request import TokenLogprobs
from scheduler_service.step import (
    DecodeRow,
    LogitAdjustment,
    PrefillChunk,
    Prefix,
    SlotSetup,
    StepCommand,
    StepResult,
)
from slotwise.v1 import inference_pb2
from slotwise.worker.v1 import worker_pb2 as pb
from slotwise.worker.v1 import worker_pb2_grpc as pb_grpc

PR_SET_PDEATHSIG = 1


class FakeWorkerServer(pb_grpc.WorkerServicer):
    """One rank. Start it in a running event loop; `die` and `start` again at will.

    load_gate, step_gate: while clear, Configure or a step does not finish (`hang`, `resume`).
    configured: fields of Configured to report otherwise. refuse: status and words for Configure.
    wrong_digest, wrong_epoch, abort_step: spoil the next step, once.
    """

    def __init__(
        self,
        address: str,
        script: Script | None = None,
        vocab_size: int = 1000,
        max_seq_len: int = 4096,
        **configured: Any,
    ) -> None:
        self.address = address
        self.script = script
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.configured = configured
        # Of TLS; None: plain.
        self.credentials: grpc.ServerCredentials | None = None
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.wrong_digest = self.wrong_epoch = self.abort_step = False
        self.load_gate = asyncio.Event()
        self.step_gate = asyncio.Event()
        self.load_gate.set()
        self.step_gate.set()
        self.configures: list[pb.Configure] = []
        self.commands: list[StepCommand] = []
        # Steps that wait at the step gate.
        self.num_waiting = 0
        self.worker: FakeWorker | None = None
        self._server: grpc.aio.Server | None = None
        self._has_stream = False

    async def start(self) -> None:
        size = 64 * 1024 * 1024
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_send_message_length", size),
                ("grpc.max_receive_message_length", size),
            ]
        )
        pb_grpc.add_WorkerServicer_to_server(self, self._server)
        if self.credentials is None:
            self._server.add_insecure_port(self.address)
        else:
            self._server.add_secure_port(self.address, self.credentials)
        await self._server.start()

    async def die(self) -> None:
        """All streams break at once."""
        assert self._server is not None
        await self._server.stop(None)
        self._has_stream = False

    def hang(self) -> None:
        self.step_gate.clear()

    def resume(self) -> None:
        self.step_gate.set()

    async def Run(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunResponse]:
        if self._has_stream:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "a stream is open")
        self._has_stream = True
        try:
            async for request in request_iterator:
                if request.HasField("configure"):
                    async for response in self._configure(request.configure, context):
                        yield response
                else:
                    yield await self._step(request.step, context)
        finally:
            self._has_stream = False

    async def _configure(
        self, configure: pb.Configure, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunResponse]:
        self.configures.append(configure)
        progress = pb.LoadProgress(stage="weights", done_bytes=1, total_bytes=2)
        yield pb.RunResponse(load_progress=progress)
        await self.load_gate.wait()
        if self.refuse is not None:
            await context.abort(*self.refuse)
        max_seq_len = configure.max_seq_len or self.max_seq_len
        max_running = configure.max_running or configure.num_slots
        max_step_tokens = configure.max_step_tokens or max(256, max_running)
        self.worker = FakeWorker(
            configure.num_slots,
            max_seq_len,
            max_step_tokens,
            self.vocab_size,
            self.script,
            max_running=max_running,
        )
        fields: dict[str, Any] = {
            "epoch": configure.epoch,
            "rank": configure.rank,
            "num_slots": configure.num_slots,
            "max_seq_len": max_seq_len,
            "num_layers": 2,
            "vocab_size": self.vocab_size,
            "fingerprint": "fake",
            "weight_dtype": "float32",
            "kv_dtype": "float32",
            "device": "cpu",
            "predicted_memory_bytes": 1000,
            "measured_memory_bytes": 1001,
            "self_tests": [inference_pb2.SelfTest(name="fake", passed=True, detail="none")],
            "num_threads": 1,
            "max_step_tokens": max_step_tokens,
            "max_mixed_step_tokens": 256,
            "run_ahead_window_ns": 40_000_000,
            "max_running": max_running,
            "max_logprobs_steps": 64,
            "prefix_reuse": pb.PREFIX_REUSE_ALL,
            "device_name": "fake",
            "build": "fake",
        }
        yield pb.RunResponse(configured=pb.Configured(**(fields | self.configured)))

    async def _step(
        self, message: pb.StepCommand, context: grpc.aio.ServicerContext
    ) -> pb.RunResponse:
        assert self.worker is not None
        command = read_command(message)
        self.commands.append(command)
        self.num_waiting += 1
        await self.step_gate.wait()
        self.num_waiting -= 1
        if self.abort_step:
            self.abort_step = False
            await context.abort(grpc.StatusCode.ABORTED, "a step failed after it began")
        try:
            result = self.worker.run(command)
        except ProtocolViolation as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        rank = self.configures[-1].rank
        response = pb.RunResponse(step_result=result_message(result, with_rows=rank == 0))
        if self.wrong_digest:
            self.wrong_digest = False
            response.step_result.digest ^= 1
        if self.wrong_epoch:
            self.wrong_epoch = False
            response.step_result.epoch -= 1
        return response


def read_command(message: pb.StepCommand) -> StepCommand:
    rows: list[PrefillChunk | DecodeRow] = []
    for row in message.rows:
        if row.HasField("decode"):
            rows.append(DecodeRow(row.slot, row.generation, row.allowed_tokens))
            continue
        chunk, prefix = row.prefill, None
        if chunk.HasField("prefix"):
            got = chunk.prefix
            prefix = Prefix(got.source_slot, got.source_generation, got.length)
        rows.append(
            PrefillChunk(
                row.slot,
                row.generation,
                chunk.start,
                tuple(chunk.token_ids),
                chunk.sample,
                read_setup(chunk.setup) if chunk.HasField("setup") else None,
                prefix,
                chunk.next_token_id if chunk.HasField("next_token_id") else None,
                row.allowed_tokens,
            )
        )
    return StepCommand(message.epoch, message.step_id, message.num_steps, tuple(rows))


def read_setup(got: pb.SlotSetup) -> SlotSetup:
    return SlotSetup(
        temperature=got.temperature,
        top_p=got.top_p,
        top_k=got.top_k,
        min_p=got.min_p,
        seed=got.seed,
        end_token_ids=tuple(got.end_token_ids),
        max_len=got.max_len,
        num_logprobs=got.num_logprobs if got.HasField("num_logprobs") else None,
        num_prompt_logprobs=got.num_prompt_logprobs
        if got.HasField("num_prompt_logprobs")
        else None,
        decode_row=got.decode_row,
        masked=got.masked,
        adjustment=read_adjustment(got.adjustment) if got.HasField("adjustment") else None,
    )


def read_adjustment(got: pb.LogitAdjustment) -> LogitAdjustment:
    return LogitAdjustment(
        frequency_penalty=got.frequency_penalty,
        presence_penalty=got.presence_penalty,
        repetition_penalty=got.repetition_penalty,
        prompt_token_ids=tuple(got.prompt_token_ids),
        generated_token_ids=tuple(got.generated_token_ids),
        biases=tuple(zip(got.bias_token_ids, got.biases, strict=True)),
        min_len=got.min_len,
    )


def result_message(result: StepResult, with_rows: bool) -> pb.StepResult:
    rows = [
        pb.RowResult(
            slot=row.slot,
            generation=row.generation,
            token_ids=row.token_ids,
            corrupted=row.corrupted,
            logprobs=map(logprobs_message, row.logprobs),
            prompt_logprobs=map(logprobs_message, row.prompt_logprobs),
        )
        for row in result.rows
    ]
    return pb.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        digest=result.digest,
        rows=rows if with_rows else [],
        duration_ns=result.duration_ns,
    )


def logprobs_message(one: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=one.logprob,
        rank=one.rank,
        best_token_ids=one.best_token_ids,
        best_logprobs=one.best_logprobs,
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    args = parser.parse_args()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    if sys.platform == "linux":
        # As --exit-with-parent.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    server = FakeWorkerServer(args.listen)
    await server.start()
    print("fake worker listens", flush=True)
    await ended.wait()
    await server.die()


if __name__ == "__main__":
    asyncio.run(main())
