"""The engine with fake workers over real gRPC: readiness, streams, loss and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import grpc
import pytest
from scheduler_driver import make_request

from fakes import FakeConstraint, FakeWorkerServer, logprobs_alone, tokens_alone
from scheduler_service.engine import Engine
from scheduler_service.engine_types import EngineConfig, EngineFailedError, EngineState
from scheduler_service.errors import (
    ConstraintError,
    DuplicateRequestError,
    GroupError,
    QueueFullError,
    UnavailableError,
    UnknownRequestError,
)
from scheduler_service.request import (
    FinishReason,
    PromptLogprobsEvent,
    Sampling,
    TokenEvent,
    choice_id,
)
from scheduler_service.step import PrefillChunk
from scheduler_service.worker_group import GroupStarter

PATIENCE_S = 60


class Rig:
    """An engine and its fake workers."""

    def __init__(self, folder, world_size=1, **changes):
        self.workers = [
            FakeWorkerServer(f"unix:{folder}/worker-{rank}.sock") for rank in range(world_size)
        ]
        config = EngineConfig(
            world_size=world_size,
            worker_addresses=tuple(worker.address for worker in self.workers),
            num_slots=2,
            max_seq_len=256,
            max_step_tokens=16,
            run_ahead_window_ns=3_000_000,
        )
        self.states: list[EngineState] = []
        self.progress = []
        self.engine = Engine(
            dataclasses.replace(config, **changes), self.states.append, self.progress.append
        )

    async def start(self):
        for worker in self.workers:
            await worker.start()
        async with asyncio.timeout(PATIENCE_S):
            await self.engine.start()

    async def close(self):
        await self.engine.stop()
        for worker in self.workers:
            worker.resume()
            await worker.die()

    async def until(self, condition):
        """Waits for a condition that the event loop will bring about."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def until_state(self, state):
        await self.until(lambda: self.engine.state is state)


@contextlib.asynccontextmanager
async def running(folder, **changes):
    rig = Rig(folder, **changes)
    try:
        await rig.start()
        yield rig
    finally:
        await rig.close()


async def read(stream):
    """All tokens of a stream, and its end."""
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if not isinstance(event, TokenEvent):
                return tokens, event
            assert event.first_index == len(tokens)
            tokens += event.token_ids
    raise AssertionError("the stream ended without its last event")


async def read_some(stream, num_tokens):
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(tokens) < num_tokens:
            event = await anext(stream)
            assert isinstance(event, TokenEvent), event
            tokens += event.token_ids
    return tokens


@pytest.mark.parametrize("world_size", [1, 2])
async def test_requests_get_their_tokens(tmp_path, world_size):
    async with running(tmp_path, world_size=world_size) as rig:
        requests = [
            make_request(f"r{i}", (i, 2, 3) * (i + 1), 30 - i, seed=2**64 - 1 - i) for i in range(8)
        ]
        streams = [rig.engine.submit([request]) for request in requests]
        assert [stream.queue_position for stream in streams] == [0, 0, 0, 1, 2, 3, 4, 5]
        for request, (tokens, end) in zip(
            requests, await asyncio.gather(*map(read, streams)), strict=True
        ):
            assert tokens == tokens_alone(request)
            assert end.reason is FinishReason.LENGTH
        load = rig.engine.load()
        assert (load.num_running, load.num_waiting, load.engine_silence_ns) == (0, 0, 0)
        assert load.counters.length == 8
        assert load.max_total_tokens == 512
        assert [view.state for view in rig.engine.slots()] == ["free", "free"]
        assert rig.workers[0].commands == rig.workers[-1].commands


async def test_info_and_progress(tmp_path):
    async with running(tmp_path, world_size=2) as rig:
        info = rig.engine.info()
        assert (info.geometry.vocab_size, info.geometry.fingerprint) == (1000, "fake")
        assert [worker.rank for worker in info.workers] == [0, 1]
        assert info.workers[1].self_tests[0].name == "fake"
        assert {progress.rank for progress in rig.progress} == {0, 1}
        first, second = (worker.configures[0] for worker in rig.workers)
        assert first.rendezvous_address == second.rendezvous_address != ""
        assert info.epoch == first.epoch


async def test_b36_not_ready_before_a_real_step_on_all_ranks(tmp_path):
    rig = Rig(tmp_path, world_size=2)
    for worker in rig.workers:
        worker.load_gate.clear()
        await worker.start()
    rig.workers[1].hang()
    start = asyncio.create_task(rig.engine.start())
    try:
        await rig.until(lambda: len(rig.progress) == 2)
        with pytest.raises(UnavailableError, match="starting"):
            rig.engine.submit([make_request("early")])
        for worker in rig.workers:
            worker.load_gate.set()
        await rig.until(lambda: rig.workers[1].num_waiting == 1 and rig.workers[0].commands)
        assert rig.engine.state is EngineState.STARTING
        with pytest.raises(UnavailableError, match="starting"):
            rig.engine.submit([make_request("early")])
        assert not start.done()
        rig.workers[1].resume()
        await start
        assert rig.states == [EngineState.READY]
        kinds = [type(command.rows[0]).__name__ for command in rig.workers[1].commands]
        assert kinds == ["PrefillChunk", "DecodeRow"]
    finally:
        await rig.close()


@pytest.mark.parametrize("world_size", [1, 2])
async def test_b34_a_dead_worker_is_noticed_and_the_streams_go_on(tmp_path, world_size):
    async with running(tmp_path, world_size=world_size) as rig:
        requests = [make_request(f"r{i}", (i, 5), 200, seed=i) for i in range(3)]
        streams = [rig.engine.submit([request]) for request in requests]
        before = [await read_some(stream, 5) for stream in streams[:2]]
        epoch = rig.engine.info().epoch
        await rig.workers[-1].die()
        # Long before worker_timeout_s (30 s): the broken stream itself is seen.
        await rig.until_state(EngineState.RECOVERING)
        queued = rig.engine.submit([make_request("queued", (9,), 3)])
        await rig.workers[-1].start()
        await rig.until_state(EngineState.READY)
        assert rig.states == [EngineState.READY, EngineState.RECOVERING, EngineState.READY]
        assert rig.engine.info().epoch > epoch
        for request, stream, head in zip(requests, streams, [*before, []], strict=True):
            rest = await read_rest(stream, len(head))
            assert head + rest == tokens_alone(request)
        assert (await read(queued))[1].reason is FinishReason.LENGTH


async def read_rest(stream, num_known):
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if isinstance(event, TokenEvent):
                assert event.first_index == num_known + len(tokens)
                tokens += event.token_ids
    return tokens


async def test_a_worker_that_dies_while_idle_is_noticed(tmp_path):
    async with running(tmp_path) as rig:
        before = rig.engine.info().epoch
        await rig.workers[0].die()
        await rig.until_state(EngineState.RECOVERING)
        await rig.workers[0].start()
        await rig.until_state(EngineState.READY)
        assert rig.engine.info().epoch > before


async def test_b35_a_wedged_worker_is_noticed(tmp_path):
    async with running(tmp_path, worker_timeout_s=1.0) as rig:
        request = make_request("a", (1, 2), 150)
        stream = rig.engine.submit([request])
        head = await read_some(stream, 3)
        rig.workers[0].hang()
        await rig.until_state(EngineState.RECOVERING)
        rig.workers[0].resume()
        await rig.until_state(EngineState.READY)
        assert head + await read_rest(stream, len(head)) == tokens_alone(request)


async def test_b35_idle_is_not_silence(tmp_path):
    async with running(tmp_path, worker_timeout_s=1.0) as rig:
        await read(rig.engine.submit([make_request("a")]))
        assert rig.engine.load().engine_silence_ns == 0
        watch = rig.engine._loop._silence
        await rig.until(lambda: watch._timer is None)
        assert rig.states == [EngineState.READY]


async def test_b24_a_wrong_digest_is_loud_and_no_token_of_it_is_released(tmp_path, caplog):
    async with running(tmp_path, world_size=2) as rig:
        request = make_request("a", (1, 2), 150)
        stream = rig.engine.submit([request])
        head = await read_some(stream, 3)
        rig.workers[1].wrong_digest = True
        await rig.until_state(EngineState.RECOVERING)
        assert "ran a step differently" in caplog.text
        await rig.until_state(EngineState.READY)
        assert head + await read_rest(stream, len(head)) == tokens_alone(request)


async def test_an_aborted_step_restarts_the_group(tmp_path):
    async with running(tmp_path, world_size=2) as rig:
        request = make_request("a", (1, 2), 150)
        stream = rig.engine.submit([request])
        head = await read_some(stream, 3)
        rig.workers[1].abort_step = True
        await rig.until(lambda: rig.states.count(EngineState.READY) == 2)
        assert head + await read_rest(stream, len(head)) == tokens_alone(request)


async def test_a_token_outside_the_vocabulary_is_not_released(tmp_path, caplog):
    async with running(tmp_path) as rig:
        request = make_request("a", (1, 2), 150)
        stream = rig.engine.submit([request])
        head = await read_some(stream, 3)
        rig.workers[0].worker.script = lambda tokens: 1000
        await rig.until(lambda: rig.states.count(EngineState.READY) == 2)
        assert "token id 1000" in caplog.text
        assert head + await read_rest(stream, len(head)) == tokens_alone(request)


async def test_results_of_an_old_epoch_are_dropped(tmp_path):
    async with running(tmp_path, worker_timeout_s=1.0) as rig:
        rig.workers[0].wrong_epoch = True
        request = make_request("a", (1, 2), 20)
        tokens, _ = await read(rig.engine.submit([request]))
        assert tokens == tokens_alone(request)
        assert EngineState.RECOVERING in rig.states, "the result that was due never came"


async def test_a_recovery_past_its_bound_ends_requests_and_goes_on_trying(tmp_path):
    async with running(tmp_path, recovery_timeout_s=2.0) as rig:
        running_stream = rig.engine.submit([make_request("a", (1, 2), 200)])
        await read_some(running_stream, 2)
        await rig.workers[0].die()
        await rig.until_state(EngineState.RECOVERING)
        queued = rig.engine.submit([make_request("q")])
        await rig.until_state(EngineState.DOWN)
        for stream in (running_stream, queued):
            async for event in stream:
                last = event
            assert (last.reason, last.status) == (FinishReason.ERROR, "UNAVAILABLE")
            assert "within 2 s" in last.message
        with pytest.raises(UnavailableError, match="have not come back"):
            rig.engine.submit([make_request("b")])
        await rig.workers[0].start()
        await rig.until_state(EngineState.READY)
        request = make_request("c")
        assert (await read(rig.engine.submit([request])))[0] == tokens_alone(request)


async def test_a_request_that_kills_every_group_is_ended(tmp_path):
    async with running(tmp_path) as rig:

        def script(tokens):
            if tokens[0] == 666:
                raise RuntimeError("the worker dies of this prompt")

        rig.workers[0].script = script
        await rig.workers[0].die()
        await rig.workers[0].start()
        await rig.until(lambda: rig.states.count(EngineState.READY) == 2)
        _, end = await read(rig.engine.submit([make_request("poison", (666,))]))
        assert (end.reason, end.status) == (FinishReason.ERROR, "INTERNAL")
        assert "died of this request twice" in end.message
        assert rig.engine.load().counters.poisoned == 1
        assert rig.states.count(EngineState.RECOVERING) == 3
        await rig.until_state(EngineState.READY)
        request = make_request("good")
        assert (await read(rig.engine.submit([request])))[0] == tokens_alone(request)


async def test_a_request_that_kills_is_given_up_alone_the_others_go_on(tmp_path):
    async with running(tmp_path, num_slots=4) as rig:

        def script(tokens):
            if tokens[0] == 666 and len(tokens) > 40:
                raise RuntimeError("the worker dies of this prompt")

        rig.workers[0].script = script
        await rig.workers[0].die()
        await rig.workers[0].start()
        await rig.until(lambda: rig.states.count(EngineState.READY) == 2)
        poison = make_request("poison", (666,), 200)
        constraint = FakeConstraint(100, 1000)
        others = [make_request(f"r{i}", (i,) * 9, 200, num_logprobs=1) for i in range(3)]
        others.append(constrained("bound", constraint, prompt=(1, 2), max_new_tokens=200))
        stream = rig.engine.submit([poison])
        streams = [rig.engine.submit([request]) for request in others]
        tokens, end = await read(stream)
        assert (end.reason, end.status) == (FinishReason.ERROR, "INTERNAL")
        assert tokens == tokens_alone(poison)[: len(tokens)]
        assert len(tokens) == end.num_generated_tokens <= 40
        for request, other in zip(others, streams, strict=True):
            assert (await read(other))[0] == tokens_alone(request)
        # Beside the others, and alone twice; a further one before.
        assert rig.states.count(EngineState.RECOVERING) == 4
        assert rig.engine.load().counters.poisoned == 1


async def test_a_set_up_that_cannot_work_is_fatal_with_the_workers_words(tmp_path):
    rig = Rig(tmp_path, world_size=2)
    rig.workers[1].refuse = (grpc.StatusCode.FAILED_PRECONDITION, "needs 9 GiB, 4 GiB are free")
    try:
        with pytest.raises(EngineFailedError, match="worker 1: needs 9 GiB, 4 GiB are free"):
            await rig.start()
        assert rig.engine.state is EngineState.STOPPED
    finally:
        await rig.close()


async def test_ranks_that_disagree_are_fatal(tmp_path):
    rig = Rig(tmp_path, world_size=2)
    rig.workers[1].configured = {"fingerprint": "other"}
    try:
        with pytest.raises(EngineFailedError, match="disagree on fingerprint: 'fake' and 'other'"):
            await rig.start()
    finally:
        await rig.close()


async def test_workers_that_come_late_are_waited_for(tmp_path):
    rig = Rig(tmp_path, connect_timeout_s=0.5)
    start = asyncio.create_task(rig.engine.start())
    try:
        first = rig.engine._starter.epoch
        await rig.until(lambda: rig.engine._starter.epoch >= first + 3)
        assert not start.done()
        await rig.workers[0].start()
        async with asyncio.timeout(PATIENCE_S):
            await start
        assert rig.engine.state is EngineState.READY
    finally:
        await rig.close()


async def test_start_can_be_given_up(tmp_path):
    rig = Rig(tmp_path)
    before = rig.engine._starter.epoch
    start = asyncio.create_task(rig.engine.start())
    await rig.until(lambda: rig.engine._starter.epoch > before)
    await rig.engine.stop()
    with pytest.raises(EngineFailedError, match="stopped before it was ready"):
        await start


async def test_a_cancelled_start_leaves_nothing(tmp_path):
    rig = Rig(tmp_path)
    before = rig.engine._starter.epoch
    start = asyncio.create_task(rig.engine.start())
    await rig.until(lambda: rig.engine._starter.epoch > before)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert rig.engine.state is EngineState.STOPPED
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_b09_cancelled_requests_free_their_slots(tmp_path):
    async with running(tmp_path) as rig:
        streams = [rig.engine.submit([make_request(f"r{i}", (i, 1), 250)]) for i in range(2)]
        for stream in streams:
            await read_some(stream, 5)
        for i in range(2):
            rig.engine.cancel(f"r{i}")
        assert rig.engine.load().num_running == 0
        request = make_request("ninth", (3,), 2)
        assert (await read(rig.engine.submit([request])))[0] == tokens_alone(request)
        assert rig.engine.load().counters.cancelled == 2
        for stream in streams:
            async for event in stream:
                last = event
            assert last.reason is FinishReason.CANCELLED
        with pytest.raises(UnknownRequestError):
            rig.engine.cancel("r0")


async def test_b12_a_deadline_ends_a_request_though_no_result_comes(tmp_path):
    async with running(tmp_path) as rig:
        rig.workers[0].hang()
        running_ = make_request("a", deadline_ns=rig.engine.now_ns() + 50_000_000)
        queued = make_request("b", deadline_ns=rig.engine.now_ns() + 60_000_000)
        streams = [rig.engine.submit([request]) for request in (running_, queued)]
        for stream in streams:
            _, end = await read(stream)
            assert end.reason is FinishReason.DEADLINE
        assert rig.engine.load().num_running == 0
        assert rig.engine.state is EngineState.READY
        rig.workers[0].resume()


async def test_stop_request(tmp_path):
    async with running(tmp_path) as rig:
        request = make_request("a", (1, 2), 250)
        stream = rig.engine.submit([request])
        await read_some(stream, 4)
        assert rig.engine.stop_request(request, 3)
        again = rig.engine.submit([make_request("a", (1, 2), 20)])
        assert not rig.engine.stop_request(request, 3)
        assert len((await read(again))[0]) == 20
        async for event in stream:
            last = event
        assert (last.reason, last.num_generated_tokens) == (FinishReason.STOP, 3)


async def test_refusals_of_submit(tmp_path):
    async with running(tmp_path, max_queue_len=1) as rig:
        rig.workers[0].hang()
        rig.engine.submit([make_request("a")])
        with pytest.raises(DuplicateRequestError):
            rig.engine.submit([make_request("a")])
        rig.engine.submit([make_request("b")])
        rig.engine.submit([make_request("c")])
        with pytest.raises(QueueFullError):
            rig.engine.submit([make_request("d")])
        rig.workers[0].resume()


async def test_b41_drain_lets_running_requests_finish(tmp_path):
    async with running(tmp_path) as rig:
        requests = [make_request(f"r{i}", (i, 1), 200) for i in range(4)]
        streams = [rig.engine.submit([request]) for request in requests]
        await read_some(streams[0], 1)
        drain = asyncio.create_task(rig.engine.drain(PATIENCE_S))
        await rig.until_state(EngineState.DRAINING)
        with pytest.raises(UnavailableError, match="shutting down"):
            rig.engine.submit([make_request("late")])
        for stream in streams[1:]:
            tokens, end = await read(stream)
            assert (len(tokens), end.reason) == (200, FinishReason.LENGTH)
        await drain
        await rig.engine.stop()
        assert rig.states == [EngineState.READY, EngineState.DRAINING, EngineState.STOPPED]


async def test_b41_what_outlives_the_grace_ends_unavailable(tmp_path):
    async with running(tmp_path) as rig:
        rig.workers[0].hang()
        stream = rig.engine.submit([make_request("a")])
        await rig.engine.drain(0.05)
        _, end = await read(stream)
        assert (end.reason, end.status) == (FinishReason.ERROR, "UNAVAILABLE")
        assert rig.engine.load().counters.error == 1


async def test_drain_survives_the_loss_of_a_worker(tmp_path):
    async with running(tmp_path) as rig:
        request = make_request("a", (1, 2), 200)
        stream = rig.engine.submit([request])
        head = await read_some(stream, 3)
        drain = asyncio.create_task(rig.engine.drain(PATIENCE_S))
        await rig.until_state(EngineState.DRAINING)
        await rig.workers[0].die()
        await rig.workers[0].start()
        assert head + await read_rest(stream, len(head)) == tokens_alone(request)
        await drain
        assert rig.states == [EngineState.READY, EngineState.DRAINING]


async def test_a_slow_reader_stops_nobody(tmp_path):
    async with running(tmp_path) as rig:
        unread = rig.engine.submit([make_request("slow", (1,), 200)])
        request = make_request("fast", (2,), 200)
        assert (await read(rig.engine.submit([request])))[0] == tokens_alone(request)
        await rig.until(lambda: rig.engine.load().num_running == 0)
        events = unread.take_ready()
        assert sum(len(event.token_ids) for event in events[:-1]) == 200
        assert unread.take_ready() == []


async def test_a_bug_of_ours_ends_requests_internal_and_service_goes_on(tmp_path, monkeypatch):
    async with running(tmp_path) as rig:
        stream = rig.engine.submit([make_request("a", (1, 2), 200)])
        await read_some(stream, 2)
        scheduler = rig.engine._loop.scheduler
        monkeypatch.setattr(scheduler, "plan_step", lambda now_ns: 1 // 0)
        async for event in stream:
            last = event
        assert (last.reason, last.status) == (FinishReason.ERROR, "INTERNAL")
        await rig.until_state(EngineState.READY)
        request = make_request("b")
        assert (await read(rig.engine.submit([request])))[0] == tokens_alone(request)
        assert rig.engine.load().counters.accepted == 2


async def test_a_bug_while_idle_is_not_lost_in_a_callback(tmp_path, monkeypatch):
    async with running(tmp_path) as rig:
        monkeypatch.setattr(rig.engine._loop.scheduler, "plan_step", lambda now_ns: 1 // 0)
        _, end = await read(rig.engine.submit([make_request("a")]))
        assert (end.reason, end.status) == (FinishReason.ERROR, "INTERNAL")
        await rig.until(lambda: rig.states.count(EngineState.READY) == 2)


async def test_a_bug_amid_a_result_leaves_no_stream_without_an_end(tmp_path, monkeypatch):
    async with running(tmp_path) as rig:
        stream = rig.engine.submit([make_request("a", (1, 2), 200)])
        await read_some(stream, 2)
        scheduler = rig.engine._loop.scheduler

        def forget_all(result, now_ns):
            scheduler.requests.clear()
            raise KeyError("a")

        monkeypatch.setattr(scheduler, "apply_result", forget_all)
        async for event in stream:
            last = event
        assert (last.reason, last.status) == (FinishReason.ERROR, "INTERNAL")
        assert last.num_generated_tokens >= 2


async def test_nothing_is_left_after_stop(tmp_path):
    async with running(tmp_path, world_size=2) as rig:
        rig.engine.submit([make_request("a", (1, 2), 200)])
        await rig.engine.stop()
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not {name for name in names if name == "engine" or name.startswith("worker")}
        with pytest.raises(UnavailableError, match="stopped"):
            rig.engine.submit([make_request("b")])
        await rig.engine.stop()


def constrained(name, constraint, **fields):
    return make_request(name, constraint=constraint, first_mask=constraint.advance(()), **fields)


async def read_all(stream):
    """Tokens, logprobs and the end of each answer, and the prompt's logprobs."""
    told, of_prompt = {}, []
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if isinstance(event, PromptLogprobsEvent):
                of_prompt += event.logprobs
                continue
            tokens, logprobs, ends = told.setdefault(event.request_id, ([], [], []))
            if isinstance(event, TokenEvent):
                assert not ends
                tokens += event.token_ids
                logprobs += event.logprobs
            else:
                ends.append(event)
    return told, of_prompt


async def test_a_stream_brings_all_answers_with_all_that_was_asked_for(tmp_path):
    async with running(tmp_path, num_slots=5, max_running=3) as rig:
        prompt = tuple(range(100, 140))
        sampling = Sampling(0.5, 0.75, 40, 0.25, 7, 0.5, -0.5, 1.5, ((3, 1.5), (900, -2.0)))
        requests = [
            make_request(
                choice_id("a", index),
                prompt,
                30,
                sampling=dataclasses.replace(sampling, seed=index),
                min_new_tokens=3,
                num_logprobs=2,
                num_prompt_logprobs=1 if index == 0 else None,
            )
            for index in range(4)
        ]
        told, of_prompt = await read_all(rig.engine.submit(requests))
        assert told.keys() == {request.request_id for request in requests}
        for request in requests:
            tokens, logprobs, ends = told[request.request_id]
            assert tokens == tokens_alone(request)
            assert logprobs == logprobs_alone(request, tokens)[1]
            assert len(ends) == 1
        assert of_prompt == logprobs_alone(requests[0], ())[0]
        load = rig.engine.load()
        assert (load.max_running, load.num_slots) == (3, 5)
        assert load.counters.prefix_cache.num_hits == 3
        # The last one went on in the slot of one that had ended.
        assert load.num_cached_tokens == 3 * 69
        configure = rig.workers[0].configures[0]
        assert (configure.num_slots, configure.max_running) == (5, 3)
        rows = [row for command in rig.workers[0].commands for row in command.rows]
        assert any(row.prefix for row in rows if isinstance(row, PrefillChunk))


async def test_flush(tmp_path):
    async with running(tmp_path) as rig:
        for _ in range(2):
            _, end = await read(rig.engine.submit([make_request("a", tuple(range(50)), 3)]))
            assert end.num_cached_tokens == 0
            _, end = await read(rig.engine.submit([make_request("b", tuple(range(50)), 3)]))
            assert end.num_cached_tokens == 49
            assert [rig.engine.flush(), rig.engine.flush()] == [52, 0]
            assert rig.engine.load().num_cached_tokens == 0


async def test_cancel_ends_all_answers_of_the_call_and_no_others(tmp_path):
    async with running(tmp_path) as rig:
        names = [choice_id("a", index) for index in range(4)]
        answers = [make_request(name, (1, 2), 250) for name in names]
        stream = rig.engine.submit(answers)
        other = make_request("other", (3,), 20)
        other_stream = rig.engine.submit([other])
        await read_some(stream, 3)
        assert rig.engine.stop_request(answers[1], 0)
        rig.engine.cancel("a")
        told, _ = await read_all(stream)
        reasons = [told[name][2][0].reason for name in names]
        assert reasons.count(FinishReason.CANCELLED) == 3
        assert reasons[1] is FinishReason.STOP
        with pytest.raises(UnknownRequestError, match="'a'"):
            rig.engine.cancel("a")
        assert (await read(other_stream))[0] == tokens_alone(other)


async def test_constrained_requests_beside_others_and_through_a_lost_worker(tmp_path):
    async with running(tmp_path, num_slots=4) as rig:
        requests = [
            constrained("bound", FakeConstraint(60, 1000), prompt=(1, 2), max_new_tokens=200),
            make_request("free", (8, 8), 200),
            constrained("stuck", FakeConstraint(5, 1000, False), max_new_tokens=200),
        ]
        streams = [rig.engine.submit([request]) for request in requests]
        head = await read_some(streams[0], 5)
        await rig.workers[0].die()
        await rig.workers[0].start()
        tokens, end = await read_from(streams[0], head)
        assert tokens == tokens_alone(requests[0])
        assert (len(tokens), end.reason, end.matched_token_id) == (60, FinishReason.STOP, None)
        assert (await read(streams[1]))[0] == tokens_alone(requests[1])
        tokens, end = await read(streams[2])
        assert tokens == tokens_alone(requests[2])
        assert (end.reason, end.status) == (FinishReason.ERROR, "FAILED_PRECONDITION")


async def read_from(stream, head):
    tokens = list(head)
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if isinstance(event, TokenEvent):
                tokens += event.token_ids
    return tokens, event


class BrokenConstraint(FakeConstraint):
    def advance(self, token_ids):
        if token_ids:
            raise self.cause
        return super().advance(token_ids)


@pytest.mark.parametrize(
    ("cause", "status", "message"),
    [
        (
            ArithmeticError("out of fuel"),
            "INTERNAL",
            "the output's constraint could not be followed: out of fuel",
        ),
        (ConstraintError("too complex"), "FAILED_PRECONDITION", "too complex"),
    ],
)
async def test_a_constraint_that_fails_ends_its_request_only(
    tmp_path, caplog, cause, status, message
):
    """Only our own faults are logged: what a caller's grammar does must not fill the log."""
    async with running(tmp_path) as rig:
        constraint = BrokenConstraint(9, 1000)
        constraint.cause = cause
        broken = constrained("broken", constraint, max_new_tokens=9)
        other = make_request("other", (3,), 50)
        streams = [rig.engine.submit([request]) for request in (broken, other)]
        tokens, end = await read(streams[0])
        assert len(tokens) == 1
        assert (end.reason, end.status, end.message) == (FinishReason.ERROR, status, message)
        assert ("a constraint failed" in caplog.text) == (status == "INTERNAL")
        assert (await read(streams[1]))[0] == tokens_alone(other)
        assert rig.states == [EngineState.READY]


class SlowConstraint(FakeConstraint):
    """`advance` waits for `gate`; counts the calls under way."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gate = threading.Event()
        self.num_calls = 0

    def advance(self, token_ids):
        if token_ids:
            self.num_calls += 1
            assert self.gate.wait(PATIENCE_S)
        return super().advance(token_ids)


async def test_a_slow_constraint_holds_nobody_up_and_may_come_too_late(tmp_path):
    async with running(tmp_path) as rig:
        slow = SlowConstraint(9, 1000)
        stream = rig.engine.submit([constrained("slow", slow, max_new_tokens=9)])
        try:
            await rig.until(lambda: slow.num_calls == 1)
            other = make_request("other", (3,), 50)
            assert (await read(rig.engine.submit([other])))[0] == tokens_alone(other)
            # Nor does another constrained one wait for its mask for long.
            bound = constrained("bound", FakeConstraint(6, 1000), max_new_tokens=9)
            assert (await read(rig.engine.submit([bound])))[0] == tokens_alone(bound)
            assert len(stream.take_ready()) == 1
            rig.engine.cancel("slow")
            # One of the same id must not get the mask of the former.
            again = SlowConstraint(4, 1000)
            again.gate.set()
            request = constrained("slow", again, max_new_tokens=9, seed=4)
            stream = rig.engine.submit([request])
        finally:
            slow.gate.set()
        tokens, end = await read(stream)
        assert tokens == tokens_alone(request)
        assert (len(tokens), end.reason) == (4, FinishReason.STOP)


async def test_an_engine_stops_while_a_constraint_is_at_work(tmp_path):
    slow = SlowConstraint(9, 1000)
    try:
        async with running(tmp_path) as rig:
            stream = rig.engine.submit([constrained("slow", slow, max_new_tokens=9)])
            await rig.until(lambda: slow.num_calls == 1)
            await rig.engine.stop()
            _, end = await read(stream)
            assert end.status == "UNAVAILABLE"
    finally:
        slow.gate.set()


async def test_a_recovery_leaves_nothing_of_its_bound_and_of_the_silence(tmp_path):
    async with running(tmp_path, recovery_timeout_s=2.0) as rig:
        stream = rig.engine.submit([make_request("a", (1, 2), 200)])
        await read_some(stream, 2)
        await rig.workers[0].die()
        await rig.until_state(EngineState.RECOVERING)
        rig.engine.cancel("a")
        await rig.workers[0].start()
        await rig.until_state(EngineState.READY)
        load = rig.engine.load()
        assert (load.num_recoveries, load.engine_silence_ns) == (1, 0)
        await asyncio.sleep(2.2)
        assert rig.engine.state is EngineState.READY


async def test_survivors_get_two_tries():
    tries: list[bool] = []

    async def start(epoch, afresh):
        tries.append(afresh)
        if len(tries) < 4:
            raise GroupError("not yet")
        return SimpleNamespace(geometry=None)

    starter = GroupStarter(SimpleNamespace(spawns=True, start=start))
    await starter.restart()
    assert tries == [False, False, True, True]
    assert starter.epoch == 4
