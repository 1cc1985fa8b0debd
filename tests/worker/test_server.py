"""The step protocol over a real gRPC server on a Unix socket; health; one stream at a time."""

from __future__ import annotations

import asyncio
import gc
import platform
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from worker_driver import Driver, sampling

from checkpoints import make_checkpoint
from slotwise.worker.v1 import worker_pb2, worker_pb2_grpc
from worker import _native
from worker import server as worker_server
from worker.batch import (
    DecodeRow,
    LogitAdjustment,
    PrefillChunk,
    Prefix,
    SlotSetup,
    StepCommand,
    StepResult,
)
from worker.checkpoint import open_checkpoint
from worker.config import MAX_MESSAGE_BYTES
from worker.device import CpuDevice
from worker.errors import PeerLostError, ProtocolError, SetupError, StepError
from worker.rank import Rank, RankSetup, resolve_limits
from worker.server import start_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = (5, 6, 7, 8, 9)
TIMEOUT_S = 120.0


@dataclass
class Served:
    rank: Rank
    folder: Path
    channel: grpc.aio.Channel
    stuck: list[str]
    address: str

    def open_stream(self) -> Any:
        return worker_pb2_grpc.WorkerStub(self.channel).Run()

    async def health(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        stub = health_pb2_grpc.HealthStub(self.channel)
        # Less than a step is held for.
        return (await stub.Check(request, timeout=TIMEOUT_S / 4)).status

    async def configured(self, **fields: Any) -> tuple[Any, worker_pb2.Configured]:
        stream = self.open_stream()
        await stream.write(worker_pb2.RunRequest(configure=configure(**fields)))
        return stream, (await answers(stream))[-1].configured


def configure(**fields: Any) -> worker_pb2.Configure:
    values = {"epoch": 1, "world_size": 1, "num_slots": 2, "max_step_tokens": 64, **fields}
    return worker_pb2.Configure(**values)


async def answers(stream: Any) -> list[worker_pb2.RunResponse]:
    """Everything up to Configured."""
    seen = []
    while not seen or not seen[-1].HasField("configured"):
        seen.append(await asyncio.wait_for(stream.read(), TIMEOUT_S))
        assert isinstance(seen[-1], worker_pb2.RunResponse)
    return seen


def prefill(step_id: int = 1, generation: int = 1, **fields: Any) -> worker_pb2.RunRequest:
    setup = worker_pb2.SlotSetup(top_p=1.0, max_len=40)
    values = {"token_ids": PROMPT, "sample": True, "setup": setup, **fields}
    chunk = worker_pb2.PrefillChunk(**values)
    row = worker_pb2.Row(slot=1, generation=generation, prefill=chunk)
    return step(step_id, row)


def decode(step_id: int, num_steps: int = 1, **fields: Any) -> worker_pb2.RunRequest:
    row = worker_pb2.Row(slot=1, generation=1, decode=worker_pb2.DecodeRow())
    return step(step_id, row, num_steps=num_steps, **fields)


def step(step_id: int, *rows: worker_pb2.Row, **fields: Any) -> worker_pb2.RunRequest:
    values = {"epoch": 1, "num_steps": 1, **fields}
    return worker_pb2.RunRequest(step=worker_pb2.StepCommand(step_id=step_id, rows=rows, **values))


async def result(stream: Any) -> worker_pb2.StepResult:
    return (await asyncio.wait_for(stream.read(), TIMEOUT_S)).step_result


async def failure(stream: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream ends that must not end well."""
    try:
        while await asyncio.wait_for(stream.read(), TIMEOUT_S) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await stream.code(), "ended well"


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 (the condition is in the server)
            await asyncio.sleep(0.01)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    rank, stuck = Rank(folder, 1), []
    server, servicer, address = await start_server(f"unix:{tmp_path}/w.sock", rank, stuck.append)
    async with grpc.aio.insecure_channel(address) as channel:
        yield Served(rank, folder, channel, stuck, address)
    await server.stop(grace=0)
    await servicer.close()


async def test_logprobs_of_who_wants_them(served: Served) -> None:
    driver = Driver(served.folder, max_seq_len=64)
    setup = sampling(40, num_logprobs=2)
    rows = [driver.run(driver.first_chunk(1, PROMPT, setup)).rows[0]]
    rows.append(driver.run(driver.decode(1), num_steps=3).rows[0])
    stream, _ = await served.configured()
    wanted = worker_pb2.SlotSetup(top_p=1.0, max_len=40, num_logprobs=2)
    for request in (prefill(setup=wanted), decode(2, 3), prefill(3, generation=2)):
        await stream.write(request)
    for row in rows:
        (got,) = (await result(stream)).rows
        assert [
            (t.logprob, t.rank, tuple(t.best_token_ids), tuple(t.best_logprobs))
            for t in got.logprobs
        ] == [(t.logprob, t.rank, t.best_token_ids, t.best_logprobs) for t in row.logprobs]
        assert len(got.logprobs) == len(got.token_ids)
    (plain,) = (await result(stream)).rows
    assert plain.token_ids
    assert not plain.logprobs
    too_many = worker_pb2.SlotSetup(top_p=1.0, max_len=40, num_logprobs=21)
    await stream.write(prefill(4, generation=3, setup=too_many))
    code, text = await failure(stream)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "num_logprobs 21 is not in [0, 20]" in text


async def test_configure_and_steps(served: Served) -> None:
    expected = Driver(served.folder, max_seq_len=64).generate(PROMPT, 9)
    stream = served.open_stream()
    await stream.write(worker_pb2.RunRequest(configure=configure(max_seq_len=48)))
    *progress, last = await answers(stream)
    assert progress
    assert all(message.HasField("load_progress") for message in progress)
    info = last.configured
    assert (info.epoch, info.rank, info.num_slots, info.max_seq_len) == (1, 0, 2, 48)
    assert (info.num_layers, info.vocab_size) == (2, 320)
    assert (info.weight_dtype, info.kv_dtype, info.device) == ("float32", "float32", "cpu")
    assert len(info.fingerprint) == 32
    assert info.predicted_memory_bytes > 0
    assert info.measured_memory_bytes > 0
    assert [test.passed for test in info.self_tests] == [True] * 4
    assert (info.max_running, info.max_logprobs_steps) == (2, 2**31 - 1)
    assert info.prefix_reuse == worker_pb2.PREFIX_REUSE_ALL
    assert info.device_name == f"{platform.machine()} {_native.CpuOps(1).isa}"
    assert info.build == f"{_native.BUILD} torch {torch.__version__}"
    assert re.fullmatch("[0-9a-f]{16}", _native.BUILD)
    for request in (prefill(), decode(2, 3), decode(3, 5)):
        await stream.write(request)
    results = [await result(stream) for _ in range(3)]
    assert [r.step_id for r in results] == [1, 2, 3]
    assert [token for r in results for token in r.rows[0].token_ids] == expected
    assert all(r.epoch == 1 and r.duration_ns > 0 for r in results)
    assert (results[0].rows[0].slot, results[0].rows[0].generation) == (1, 1)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() == grpc.StatusCode.OK


@pytest.mark.parametrize(("asked", "num_running"), [(0, 5), (1, 1), (5, 5)])
async def test_slots_that_may_run(served: Served, asked: int, num_running: int) -> None:
    _, info = await served.configured(num_slots=5, max_running=asked)
    assert (info.num_slots, info.max_running) == (5, num_running)


@pytest.mark.parametrize(
    ("failing", "reuse"),
    [
        ("prefill_kv_equals_decode_kv", worker_pb2.PREFIX_REUSE_PREFILL),
        ("chunks_equal_whole_prefill", worker_pb2.PREFIX_REUSE_NONE),
    ],
)
async def test_a_self_test_that_fails_limits_what_is_reused(
    served: Served, monkeypatch: pytest.MonkeyPatch, failing: str, reuse: int
) -> None:
    import worker.rank

    run = worker.rank.run_self_tests
    monkeypatch.setattr(
        worker.rank,
        "run_self_tests",
        lambda *a: [replace(test, passed=test.name != failing) for test in run(*a)],
    )
    _, info = await served.configured()
    assert info.prefix_reuse == reuse
    assert {test.name for test in info.self_tests if not test.passed} == {failing}


def adjustment(**fields: Any) -> worker_pb2.LogitAdjustment:
    return worker_pb2.LogitAdjustment(repetition_penalty=1.0, **fields)


def setup_with(**fields: Any) -> worker_pb2.SlotSetup:
    return worker_pb2.SlotSetup(top_p=1.0, max_len=40, **fields)


async def test_every_field_reaches_the_rank(served: Served) -> None:
    """Row by row against the same commands as plain data."""
    mask = bytes(20) + b"\xf0" + bytes(19)
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -1.25, "repetition_penalty": 1.5}
    ids = {"prompt_token_ids": (5, 9), "generated_token_ids": (160, 161, 160)}
    plain = LogitAdjustment(**penalties, **ids, biases=((162, 3.0), (7, -2.5)), min_len=6)
    wanted = worker_pb2.SlotSetup(
        temperature=0.5,
        top_p=1.0,
        max_len=40,
        end_token_ids=[163],
        num_logprobs=1,
        num_prompt_logprobs=0,
        decode_row=1,
        masked=True,
        adjustment=worker_pb2.LogitAdjustment(
            **penalties, **ids, bias_token_ids=[162, 7], biases=[3.0, -2.5], min_len=6
        ),
    )
    driver = Driver(served.folder, max_seq_len=64, num_slots=4, max_running=2)
    setup = SlotSetup(0.5, 1.0, 0, 0.0, 0, (163,), 40, 1, 0, 1, True, plain)
    piece, more = PrefillChunk(3, 1, 0, PROMPT, False, setup, None, 8), (8, 7)
    prefix = Prefix(3, 1, 6)
    other = SlotSetup(0.0, 1.0, 0, 0.0, 0, (), 40)
    commands = [
        (piece,),
        (PrefillChunk(3, 1, 5, more, True, None, allowed_tokens=mask),),
        (DecodeRow(3, 1, mask), PrefillChunk(2, 1, 6, (9,), True, other, prefix)),
    ]
    chunks = [
        worker_pb2.PrefillChunk(token_ids=PROMPT, setup=wanted, next_token_id=8),
        worker_pb2.PrefillChunk(start=5, token_ids=more, sample=True),
        worker_pb2.PrefillChunk(
            start=6,
            token_ids=[9],
            sample=True,
            setup=worker_pb2.SlotSetup(top_p=1.0, max_len=40),
            prefix=worker_pb2.Prefix(source_slot=3, source_generation=1, length=6),
        ),
    ]
    decoding = worker_pb2.DecodeRow()
    requests = [
        step(1, worker_pb2.Row(slot=3, generation=1, prefill=chunks[0])),
        step(2, worker_pb2.Row(slot=3, generation=1, prefill=chunks[1], allowed_tokens=mask)),
        step(
            3,
            worker_pb2.Row(slot=3, generation=1, decode=decoding, allowed_tokens=mask),
            worker_pb2.Row(slot=2, generation=1, prefill=chunks[2]),
        ),
    ]
    read = [worker_server._step_command(request).rows for request in requests]
    assert read == commands
    stream, _ = await served.configured(max_seq_len=64, num_slots=4, max_running=2)
    seen = []
    for request, rows in zip(requests, commands, strict=True):
        await stream.write(request)
        got, expected = await result(stream), driver.run(*rows)
        assert got.digest == expected.digest
        for message, row in zip(got.rows, expected.rows, strict=True):
            assert tuple(message.token_ids) == row.token_ids
            seen.append(len(message.prompt_logprobs))
            for said, token in zip(message.prompt_logprobs, row.prompt_logprobs, strict=True):
                assert (said.logprob, said.rank) == (token.logprob, token.rank)
    assert seen == [5, 1, 0, 0]


async def test_defaults(served: Served) -> None:
    _, info = await served.configured(max_seq_len=0, weight_dtype="auto", kv_dtype="bfloat16")
    assert (info.max_seq_len, info.weight_dtype, info.kv_dtype) == (640, "float32", "bfloat16")


async def test_health_follows_the_stream(served: Served) -> None:
    assert await served.health("") == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.health("slotwise.worker/0")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    stream, _ = await served.configured()
    assert await served.health("slotwise.worker/0") == NOT_SERVING
    await stream.write(prefill())
    await result(stream)

    async def is_(status: int) -> bool:
        return await served.health("slotwise.worker/0") == status

    await eventually(lambda: is_(SERVING))
    stream.cancel()
    await eventually(lambda: is_(NOT_SERVING))
    assert await served.health("") == SERVING


async def test_health_answers_during_a_long_step(served: Served) -> None:
    """B35: a step that takes long (here: until it is let go) does not hold up the event loop."""
    stream, _ = await served.configured()
    running, let_go = threading.Event(), threading.Event()
    run = served.rank.executor.submit

    def slow(command: StepCommand) -> StepResult:
        running.set()
        let_go.wait(TIMEOUT_S)
        return run(command)

    served.rank.executor.submit = slow  # type: ignore[method-assign]
    await stream.write(prefill())
    assert await asyncio.to_thread(running.wait, TIMEOUT_S)
    for _ in range(20):
        assert await served.health("") == SERVING
    let_go.set()
    assert (await result(stream)).step_id == 1


async def test_one_stream_at_a_time(served: Served) -> None:
    first, _ = await served.configured()
    code, message = await failure(served.open_stream())
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert "one" in message
    await first.write(prefill())
    assert (await result(first)).step_id == 1


@pytest.mark.parametrize("half_close", [True, False])
async def test_streams_after_one_another_start_clean(served: Served, half_close: bool) -> None:
    tokens = []
    for epoch in (1, 2, 3):
        stream, info = await served.configured(epoch=epoch)
        assert info.epoch == epoch
        request = prefill()
        request.step.epoch = epoch
        await stream.write(request)
        tokens.append(list((await result(stream)).rows[0].token_ids))
        if half_close:
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        else:
            stream.cancel()
            await eventually(lambda: free(served))
    assert tokens[0] == tokens[1] == tokens[2]


async def free(served: Served) -> bool:
    """Whether the server has seen the end of the last stream."""
    stream = served.open_stream()
    await stream.done_writing()
    return await stream.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_slots_are_dropped_when_the_stream_ends(served: Served) -> None:
    stream, _ = await served.configured()
    assert served.rank.executor.epoch == 1
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    await eventually(lambda: free(served))
    with pytest.raises(ProtocolError, match="not configured"):
        _ = served.rank.executor


async def test_the_collector_leaves_a_configured_rank_alone(served: Served) -> None:
    """Until the stream ends: then it must find what the slots held."""
    stream, _ = await served.configured()
    assert gc.get_freeze_count() > 0
    stream.cancel()

    async def collected() -> bool:
        return gc.get_freeze_count() == 0

    await eventually(collected)


async def test_weights_stay_loaded_for_the_same_model(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    import worker.rank

    loads, load = [], worker.rank.load_weights
    monkeypatch.setattr(
        worker.rank, "load_weights", lambda *args: loads.append(args[2]) or load(*args)
    )
    for dtype in ("float32", "float32", "bfloat16", "bfloat16", "auto"):
        stream, _ = await served.configured(weight_dtype=dtype, num_slots=1 + len(loads))
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    assert loads == ["float32", "bfloat16", "float32"]


@pytest.mark.parametrize(("asked", "num_rows"), [(0, 256), (64, 64)])
async def test_the_rows_of_a_step_are_as_asked_or_what_suits_the_device(
    served: Served, asked: int, num_rows: int
) -> None:
    _, configured = await served.configured(max_step_tokens=asked)
    assert configured.max_step_tokens == num_rows
    assert (configured.max_mixed_step_tokens, configured.run_ahead_window_ns) == (256, 40_000_000)


def test_many_slots_widen_the_step_unless_it_is_given(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model", "qwen3"))
    limits = resolve_limits(checkpoint, RankSetup(1, num_slots=300), CpuDevice)
    assert limits.max_step_tokens == 300
    with pytest.raises(SetupError, match="max_step_tokens 299 is less than max_running 300"):
        resolve_limits(checkpoint, RankSetup(1, num_slots=300, max_step_tokens=299), CpuDevice)
    few = RankSetup(1, num_slots=300, max_running=299, max_step_tokens=299)
    assert resolve_limits(checkpoint, few, CpuDevice).max_step_tokens == 299


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"epoch": 0}, "INVALID_ARGUMENT", "epoch 0"),
        ({"world_size": 0}, "INVALID_ARGUMENT", "world_size 0"),
        ({"num_slots": 0}, "FAILED_PRECONDITION", "num_slots.*0"),
        ({"max_running": 3}, "FAILED_PRECONDITION", "max_running 3 is more than num_slots 2"),
        (
            {"num_slots": 9, "max_running": 5, "max_step_tokens": 4},
            "FAILED_PRECONDITION",
            "max_step_tokens 4.*max_running 5",
        ),
        ({"max_step_tokens": 1}, "FAILED_PRECONDITION", "max_step_tokens 1.*2"),
        ({"max_seq_len": 641}, "FAILED_PRECONDITION", "max_seq_len 641.*640"),
        ({"weight_dtype": "int4"}, "FAILED_PRECONDITION", "weight_dtype 'int4'.*bfloat16"),
        ({"kv_dtype": "fp8"}, "FAILED_PRECONDITION", "kv_dtype 'fp8'"),
        ({"world_size": 4}, "FAILED_PRECONDITION", "4 ranks.*1, 2, 6"),
        ({"num_slots": 2**31, "max_step_tokens": 2**31}, "FAILED_PRECONDITION", "slots x 640"),
    ],
)
async def test_set_up_refused(
    served: Served, fields: dict[str, Any], code: str, named: str
) -> None:
    stream = served.open_stream()
    await stream.write(worker_pb2.RunRequest(configure=configure(**fields)))
    status, message = await failure(stream)
    assert status == grpc.StatusCode[code]
    assert re.search(named, message), message
    await served.configured()  # and the worker still serves


async def test_broken_checkpoint(served: Served) -> None:
    (served.folder / "model.safetensors").unlink()
    stream = served.open_stream()
    await stream.write(worker_pb2.RunRequest(configure=configure()))
    status, message = await failure(stream)
    assert status == grpc.StatusCode.FAILED_PRECONDITION
    assert "model.safetensors" in message


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (decode(1), "slot 1"),
        (prefill(step_id=2), "step id 2"),
        (prefill(token_ids=[320]), "token id 320"),
        (prefill(start=3), "starts at 3"),
        (prefill(token_ids=[4] * 65), "65 tokens|max_len"),
        (step(1, worker_pb2.Row(slot=1, generation=1)), "neither prefill nor decode"),
        (prefill(setup=setup_with(decode_row=2)), r"slot 1: decode row 2 is not in \[0, 2\)"),
        (prefill(setup=setup_with(masked=True)), "slot 1: 0 bytes of allowed_tokens, 40 are due"),
        (prefill(setup=setup_with(num_prompt_logprobs=21)), "num_prompt_logprobs 21"),
        (prefill(next_token_id=0), "slot 1: next_token_id"),
        (prefill(start=1, prefix=worker_pb2.Prefix(length=1)), "prefix of 1 positions of slot 0"),
        (prefill(prefix=worker_pb2.Prefix()), "prefix of 0 positions of slot 0"),
        (
            prefill(setup=setup_with(adjustment=worker_pb2.LogitAdjustment())),
            "slot 1: repetition_penalty 0.0",
        ),
        (
            prefill(setup=setup_with(adjustment=adjustment(bias_token_ids=[1, 2], biases=[0.5]))),
            "2 bias_token_ids and 1 biases",
        ),
        (step(1), "at least one row"),
        (worker_pb2.RunRequest(configure=configure()), "only steps"),
        (worker_pb2.RunRequest(), "only steps"),
    ],
)
async def test_command_refused(served: Served, request_: worker_pb2.RunRequest, named: str) -> None:
    stream, _ = await served.configured()
    await stream.write(request_)
    status, message = await failure(stream)
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(named, message), message
    await served.configured()


@pytest.mark.parametrize("first", [prefill(), worker_pb2.RunRequest(), None])
async def test_first_message_must_configure(
    served: Served, first: worker_pb2.RunRequest | None
) -> None:
    stream = served.open_stream()
    if first is None:
        await stream.done_writing()
    else:
        await stream.write(first)
    assert (await failure(stream))[0] == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("is_first", [True, False])
async def test_bytes_that_are_no_message_end_the_stream(
    served: Served, is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = served.channel.stream_stream("/slotwise.worker.v1.Worker/Run")()
    if not is_first:
        await stream.write(worker_pb2.RunRequest(configure=configure()).SerializeToString())
        while not worker_pb2.RunResponse.FromString(await stream.read()).HasField("configured"):
            pass
    await stream.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError, match="no message") as caught:
        await asyncio.wait_for(stream.read(), TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text
    await served.configured()


@pytest.mark.parametrize(
    ("error", "code"),
    [(PeerLostError, grpc.StatusCode.ABORTED), (StepError, grpc.StatusCode.INTERNAL)],
)
async def test_a_failed_step_tells_whose_fault_it_was(
    served: Served, error: type[StepError], code: grpc.StatusCode
) -> None:
    stream, _ = await served.configured()

    def fail(_: StepCommand) -> StepResult:
        raise error("step 1 failed: so it is")

    served.rank.executor.submit = fail  # type: ignore[method-assign]
    await stream.write(prefill())
    await stream.write(decode(2))
    assert await failure(stream) == (code, "step 1 failed: so it is")


async def test_a_failed_device_is_reported(served: Served) -> None:
    stream, _ = await served.configured()

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    served.rank.release = fail  # type: ignore[method-assign]
    stream.cancel()
    await eventually(lambda: asyncio.sleep(0, bool(served.stuck)))
    assert "cannot be used any more: an illegal memory access" in served.stuck[0]


async def test_memory_that_runs_out_is_a_refusal(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(served.rank, "_configure", fail)
    stream = served.open_stream()
    await stream.write(worker_pb2.RunRequest(configure=configure()))
    code, message = await failure(stream)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "memory ran out although the plan fitted" in message
    assert "--num-slots" in message


async def test_a_step_that_never_ends_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    rank, stuck, let_go = Rank(folder, 1), [], threading.Event()
    address = f"unix:{tmp_path}/w.sock"
    server, servicer, _ = await start_server(address, rank, stuck.append, release_timeout_s=0.2)
    async with grpc.aio.insecure_channel(address) as channel:
        served = Served(rank, folder, channel, stuck, address)
        stream, _ = await served.configured()
        running = threading.Event()

        def hang(_: StepCommand) -> StepResult:
            running.set()
            let_go.wait(TIMEOUT_S)
            raise StepError("let go")

        rank.executor.submit = hang  # type: ignore[method-assign]
        monkeypatch.setattr(Rank, "waits_for_peers", True)
        await stream.write(prefill())
        assert await asyncio.to_thread(running.wait, TIMEOUT_S)
        stream.cancel()

        async def reported() -> bool:
            return bool(stuck)

        await eventually(reported)
        assert "still runs" in stuck[0]
        let_go.set()
    await server.stop(grace=0)
    await servicer.close()


async def test_a_lone_rank_is_waited_for(served: Served) -> None:
    stream, _ = await served.configured()
    assert not served.rank.waits_for_peers
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_a_bug_is_internal(served: Served) -> None:
    stream, _ = await served.configured()

    def fail(_: StepCommand) -> StepResult:
        raise KeyError("slot")

    served.rank.executor.submit = fail  # type: ignore[method-assign]
    await stream.write(prefill())
    assert await failure(stream) == (grpc.StatusCode.INTERNAL, "KeyError: 'slot'")


async def test_cancel_while_loading(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    import worker.rank

    loading, load = threading.Event(), worker.rank.load_weights

    def endless(*arguments: Any) -> Any:
        loading.set()
        *_, progress = arguments
        while True:
            progress(1, 2)

    monkeypatch.setattr(worker.rank, "load_weights", endless)
    stream = served.open_stream()
    await stream.write(worker_pb2.RunRequest(configure=configure()))
    assert await asyncio.to_thread(loading.wait, TIMEOUT_S)
    stream.cancel()
    await eventually(lambda: free(served))
    monkeypatch.setattr(worker.rank, "load_weights", load)
    await served.configured()
    assert served.stuck == []


async def test_large_and_too_large_messages(served: Served) -> None:
    """B39: 64 Ki token ids pass the transport; 64 MiB is the limit, on purpose."""
    stream, _ = await served.configured()
    await stream.write(prefill(token_ids=[300] * 2_000_000))
    status, message = await failure(stream)
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert "2000001 tokens" in message
    stream, _ = await served.configured()
    await stream.write(prefill(token_ids=[2**31] * (MAX_MESSAGE_BYTES // 5 + 1)))
    assert (await failure(stream))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_reflection_lists_the_services(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert {"slotwise.worker.v1.Worker", "grpc.health.v1.Health"} <= names


async def test_socket_in_use(served: Served) -> None:
    with pytest.raises(OSError, match="another process serves there"):
        await start_server(served.address, served.rank, served.stuck.append)


async def test_port_in_use(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 1)
    first, servicer, address = await start_server("127.0.0.1:0", rank, print)
    assert not address.endswith(":0")
    with pytest.raises(OSError, match=address):
        await start_server(address, rank, print)
    await first.stop(grace=0)
    await servicer.close()
