from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

from scheduler_driver import make_limits, make_request

from fakes import FakeWorker
from scheduler_service.errors import GroupError, UnavailableError
from scheduler_service.mask_runner import MaskRunner
from scheduler_service.request import FinishedEvent, Mask, TokenEvent
from scheduler_service.scheduler import Scheduler
from scheduler_service.serve_loop import ServeLoop, SilenceWatch
from scheduler_service.step import StepCommand


async def test_silence_is_told_once_it_lasted():
    told: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    watch = SilenceWatch(0.01, told.set_result)
    assert watch.silence_ns == 0
    watch.expect()
    async with asyncio.timeout(60):
        assert await told >= 0.01
    assert watch.silence_ns > 0
    watch.stop()
    assert watch.silence_ns == 0


async def test_what_was_heard_in_time_is_no_silence():
    told: list[float] = []
    watch = SilenceWatch(0.01, told.append)
    watch.expect()
    watch.heard(more_is_due=False)
    assert watch.silence_ns == 0
    async with asyncio.timeout(60):
        while watch._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert told == []


async def test_the_time_that_we_stood_still_is_not_their_silence():
    """SIGSTOP, a host that swaps: the workers' results are read first."""
    told: list[float] = []
    watch = SilenceWatch(0.2, told.append)
    watch.expect()
    time.sleep(1.0)  # noqa: ASYNC251  (the event loop does not run)
    async with asyncio.timeout(60):
        while watch.silence_ns > 500_000_000:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert told == []
    watch.heard(more_is_due=False)
    watch.stop()


async def test_suspended_it_counts_but_does_not_tell():
    told: list[float] = []
    watch = SilenceWatch(0.005, told.append)
    watch.expect()
    watch.suspend()
    async with asyncio.timeout(60):
        while watch.silence_ns < 20_000_000:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert told == []


class Endless:
    """A constraint that allows all."""

    def advance(self, token_ids):
        return Mask(b"\xff", True)


async def test_without_a_thread_one_request_fails_alone(monkeypatch):
    told: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    masks = MaskRunner(lambda _request, _number, mask: told.set_result(mask))
    request = make_request("r")
    request.constraint = Endless()

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    masks.advance(request, (1,))
    error = await told
    assert isinstance(error, UnavailableError)
    assert "cannot be followed now: can't start new thread" in str(error)
    masks.close()


class LocalGroup:
    """Runs a command as it is sent, until until_ns at least; lost when nothing is due."""

    def __init__(self, order, until_ns=0):
        self.order = order
        self.until_ns = until_ns
        self.worker = FakeWorker(num_slots=1)
        self.results = deque()

    def send(self, command):
        self.order.append(command)
        while time.monotonic_ns() <= self.until_ns:
            time.sleep(0.01)
        self.results.append(self.worker.run(command))

    async def receive(self):
        if not self.results:
            raise GroupError("nothing is due")
        return self.results.popleft()


async def what_happens(until_ns=0, **fields):
    """Kinds of the commands and events of one request, in order."""
    order = []
    limits = make_limits(num_slots=1, max_outstanding=1, max_steps_per_command=1)
    scheduler = Scheduler(limits)
    scheduler.submit([make_request("a", max_new_tokens=3, **fields)])
    loop = ServeLoop(scheduler, LocalGroup(order, until_ns), order.extend, worker_timeout_s=60)
    await loop.serve()
    loop.close()
    return [type(entry) for entry in order]


async def test_the_next_command_goes_out_before_clients_are_told():
    assert await what_happens() == [
        *(StepCommand, StepCommand, TokenEvent),
        *(StepCommand, TokenEvent),
        *(TokenEvent, FinishedEvent),
    ]


async def test_tokens_of_a_late_result_come_before_the_deadline_that_it_passed():
    deadline_ns = time.monotonic_ns() + 10**9
    kinds = await what_happens(until_ns=deadline_ns, deadline_ns=deadline_ns)
    assert kinds == [StepCommand, TokenEvent, FinishedEvent]


class SilentGroup:
    """Keeps what it is sent; gives no results."""

    def __init__(self):
        self.sent = []

    def send(self, command):
        self.sent.append(command)

    async def receive(self):
        await asyncio.Event().wait()


async def test_a_command_is_on_its_way_before_the_next_one_is_planned():
    group = SilentGroup()
    scheduler = Scheduler(make_limits(num_slots=1, max_outstanding=2))
    loop = ServeLoop(scheduler, group, list, worker_timeout_s=60)
    serving = asyncio.create_task(loop.serve())
    await asyncio.sleep(0)
    scheduler.submit([make_request("a", max_new_tokens=5)])
    loop.pump_soon()
    counts = []
    for _ in range(4):
        await asyncio.sleep(0)
        counts.append(len(group.sent))
    assert counts == [1, 2, 2, 2]
    serving.cancel()
    loop.close()


class Told:
    """Events are told into `order` by a task, as a client's is woken by them."""

    def __init__(self, order):
        self.order = order
        self.events = asyncio.Queue()
        self.task = asyncio.create_task(self.run())

    def __call__(self, events):
        for event in events:
            self.events.put_nowait(event)

    async def run(self):
        while True:
            self.order.append(await self.events.get())


class PacedGroup(LocalGroup):
    """Gives a result when it is let."""

    def __init__(self, order):
        super().__init__(order)
        self.may_give = asyncio.Semaphore(0)

    async def receive(self):
        await self.may_give.acquire()
        return await super().receive()


async def test_a_first_token_goes_out_before_a_command_that_workers_need_not_wait_for():
    order = []
    group, told = PacedGroup(order), Told(order)
    limits = make_limits(num_slots=1, max_outstanding=2, max_steps_per_command=1)
    scheduler = Scheduler(limits)
    scheduler.submit([make_request("a", max_new_tokens=9)])
    loop = ServeLoop(scheduler, group, told, worker_timeout_s=60)
    serving = asyncio.create_task(loop.serve())

    async def kinds():
        for _ in range(9):
            await asyncio.sleep(0)
        return [type(entry) for entry in order]

    assert await kinds() == [StepCommand, StepCommand]
    group.may_give.release()
    # The command does not wait for another result.
    assert await kinds() == [StepCommand, StepCommand, TokenEvent, StepCommand]
    group.may_give.release()
    assert (await kinds())[4:] == [StepCommand, TokenEvent]
    for task in (serving, told.task):
        task.cancel()
    loop.close()


async def test_nothing_is_planned_or_told_after_the_close():
    told = []
    scheduler = Scheduler(make_limits(num_slots=1))
    scheduler.submit([make_request("a", max_new_tokens=3, deadline_ns=1)])
    loop = ServeLoop(scheduler, SilentGroup(), told.extend, worker_timeout_s=60)
    loop.pump_soon()
    loop.close()
    await asyncio.sleep(0)
    assert told == []
    assert loop._timer is None
