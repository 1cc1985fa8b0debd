"""Every alert fires where the thing itself happens, and not where it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
import yaml
from clients.gateways import gateway_beside
from fake_worker import CORRUPTED
from free_ports import fixed_port
from monitoring.prometheus import MONITORING, WAIT_S, Prometheus, running_prometheus
from tokenizer_files import write_model

from checkpoints import make_checkpoint
from integration.front import Front, running_front
from integration.servers import Server, running_server
from scheduler_service.metrics_port import metrics_port
from scheduler_service.service import Model, load_model
from slotwise.v1 import inference_pb2 as pb

RULES = {
    rule["alert"]
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
# Token 7 in a prompt gives bad logits, token 9 kills the worker.
BAD, DEADLY = 7, 9


def script(tokens) -> int | None:
    if DEADLY in tokens[:2]:
        raise RuntimeError("this request kills the worker")
    return CORRUPTED if BAD in tokens[:2] else None


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return load_model(write_model(tmp_path_factory.mktemp("model")), "")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=512)


def ask(first: int = 5, max_new_tokens: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[first, 6]), max_new_tokens=max_new_tokens, ignore_eos=True
    )


class Scene:
    """A server of its own, something that happens there, and the alerts that it must raise."""

    def __init__(self, prometheus: Prometheus, model: Model, folder: Path) -> None:
        self.prometheus = prometheus
        self._model = model
        self._folder = folder
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def front(self, name: str, start: bool = True, **engine) -> AsyncIterator[Front]:
        """A server that is scraped; `address` is the target's name."""
        folder = self._folder / name
        folder.mkdir()
        async with (
            running_front(self._model, folder, script, start, **engine) as front,
            metrics_port("127.0.0.1", 0, front.metrics.text) as self.address,
        ):
            self.prometheus.watch(self.address)
            try:
                yield front
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(
        self,
        names: set[str],
        again: Callable[[], Awaitable[None]] | None = None,
        address: str | None = None,
    ) -> None:
        """Does it again until all of these have fired."""
        seen: set[str] = set()
        try:
            async with asyncio.timeout(WAIT_S):
                while not names <= seen:
                    if again is not None:
                        await again()
                    await asyncio.sleep(0.1)
                    seen |= await self.prometheus.firing(address or self.address)
        except TimeoutError:
            raise AssertionError(f"only {seen or 'none'} of {names} fired") from None

    def send(self, front: Front, request: pb.GenerateRequest) -> None:
        """In the background, whatever becomes of it."""

        async def run() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await front.collect(request)

        self._tasks.append(asyncio.create_task(run()))


async def absent(scene: Scene) -> set[str]:
    address = f"127.0.0.1:{fixed_port()}"
    scene.prometheus.watch(address)
    await scene.until({"SlotwiseAbsent"}, address=address)
    return {"SlotwiseAbsent"}


async def starts_for_ever(scene: Scene) -> set[str]:
    async with scene.front("starts", start=False):
        await scene.until({"SlotwiseNotReady"})
    return {"SlotwiseNotReady"}


async def rank_is_lost(scene: Scene) -> set[str]:
    """Its address is gone; the group does not come back."""
    alerts = {"SlotwiseRankDown", "SlotwiseNotReady"}
    async with scene.front("lost") as front:
        await front.worker.die()
        await scene.until(alerts)
        load = await front.load()
        assert [one.is_up for one in load.ranks] == [False]
        assert load.state == pb.SERVER_STATE_RECOVERING
        await front.worker.start()
        await front.until(lambda load: load.state == pb.SERVER_STATE_READY)
        assert [one.is_up for one in (await front.load()).ranks] == [True]
    return {"SlotwiseRankDown"}


async def recovers_often(scene: Scene) -> set[str]:
    async with scene.front("often") as front:

        async def lose_and_come_back() -> None:
            num_before = (await front.load()).num_recoveries
            await front.worker.die()
            await front.until(lambda load: load.state == pb.SERVER_STATE_RECOVERING)
            await front.worker.start()
            await front.until(lambda load: load.num_recoveries > num_before)

        await scene.until({"SlotwiseRecoversOften"}, lose_and_come_back)
    return {"SlotwiseRecoversOften"}


async def workers_are_silent(scene: Scene) -> set[str]:
    """The second request waits for the one slot as long."""
    alerts = {"SlotwiseEngineSilent", "SlotwiseLongWait"}
    async with scene.front("silent", num_slots=1, worker_timeout_s=WAIT_S) as front:
        front.worker.hang()
        for _ in range(2):
            scene.send(front, ask())
        await scene.until(alerts)
        front.worker.resume()
    return alerts


async def queue_is_full(scene: Scene) -> set[str]:
    async with scene.front("full", num_slots=1, max_queue_len=1) as front:
        front.worker.hang()
        for _ in range(2):
            scene.send(front, ask())
        await front.until(lambda load: load.num_running + load.num_waiting == 2)

        async def one_more() -> None:
            error = await front.error(front.stub.Generate(ask()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        await scene.until({"SlotwiseQueueFull"}, one_more)
        front.worker.resume()
    return {"SlotwiseQueueFull"}


async def first_tokens_are_slow(scene: Scene) -> set[str]:
    """Requests that have waited for more than ten seconds get their tokens one by one."""
    alerts = {"SlotwiseSlowFirstToken", "SlotwiseLongWait"}
    async with scene.front("slow", num_slots=1, worker_timeout_s=WAIT_S) as front:
        meter = front.hold()
        for _ in range(100):
            scene.send(front, ask())
        await front.until(lambda load: load.oldest_waiting_ns > 12e9)

        async def one_goes_on() -> None:
            meter.allow(1)

        await scene.until(alerts, one_goes_on)
        front.release()
    return {"SlotwiseSlowFirstToken"}


async def logits_are_no_numbers(scene: Scene) -> set[str]:
    alerts = {"SlotwiseCorruptedRequests", "SlotwiseErrors"}
    async with scene.front("corrupted") as front:

        async def one_more() -> None:
            error = await front.error(front.stub.Generate(ask(BAD)))
            assert error.code() is grpc.StatusCode.INTERNAL

        await scene.until(alerts, one_more)
        assert (await front.load()).requests.corrupted > 0
    return alerts


async def workers_die_of_requests(scene: Scene) -> set[str]:
    alerts = {"SlotwisePoisonedRequests", "SlotwiseRecoversOften"}
    async with scene.front("poisoned") as front:

        async def one_more() -> None:
            error = await front.error(front.stub.Generate(ask(DEADLY)))
            assert error.code() is grpc.StatusCode.INTERNAL

        await scene.until(alerts, one_more)
    return {"SlotwisePoisonedRequests"}


async def gateway_is_alone(scene: Scene) -> set[str]:
    async with gateway_beside(f"127.0.0.1:{fixed_port()}") as gateway:
        address = gateway.url.removeprefix("http://")
        scene.prometheus.watch(address)
        await scene.until({"SlotwiseGatewayAlone"}, address=address)
    return {"SlotwiseGatewayAlone"}


SCENES = (
    absent,
    starts_for_ever,
    rank_is_lost,
    recovers_often,
    workers_are_silent,
    queue_is_full,
    first_tokens_are_slow,
    logits_are_no_numbers,
    workers_die_of_requests,
    gateway_is_alone,
)
# Provoked in a test of its own.
ELSEWHERE = {"SlotwiseJournalFailing"}


async def test_alerts_fire_where_they_are_provoked(model, tmp_path):
    """All scenes at once; beside them a server that works well, for which none fires."""
    (tmp_path / "prometheus").mkdir()
    async with running_prometheus(tmp_path / "prometheus") as prometheus:
        quiet = Scene(prometheus, model, tmp_path)
        async with quiet.front("quiet") as front:
            work = asyncio.gather(*(play(Scene(prometheus, model, tmp_path)) for play in SCENES))
            seen = set()
            while not work.done():
                await front.collect(ask(max_new_tokens=3))
                seen |= await prometheus.firing(quiet.address)
                await asyncio.sleep(0.2)
            provoked = set().union(*await work)
            assert seen == set()
            found = await prometheus.query(f'up{{instance="{quiet.address}"}}')
            assert [one["value"][1] for one in found] == ["1"]
            as_vllm = await prometheus.query("vllm:generation_tokens_total > 0")
            assert quiet.address in {one["metric"]["instance"] for one in as_vllm}
    assert provoked | ELSEWHERE == RULES, "an alert that nothing here provokes"


async def test_a_killed_worker_and_a_journal_that_cannot_be_written(tiny, tmp_path):
    """The processes themselves."""
    (tmp_path / "prometheus").mkdir()
    port = fixed_port()
    flags = ["--metrics-port", str(port), "--journal", str(tmp_path / "journal"), "--threads", "1"]

    async def until(prometheus: Prometheus, name: str, again: Callable[[], None]) -> None:
        async with asyncio.timeout(WAIT_S):
            while name not in await prometheus.firing(f"127.0.0.1:{port}"):
                await asyncio.to_thread(again)
                await asyncio.sleep(0.1)

    def kill_worker(server: Server) -> None:
        for pid in server.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async with running_prometheus(tmp_path / "prometheus") as prometheus:
        prometheus.watch(f"127.0.0.1:{port}")
        with running_server(tiny, *flags) as server:
            await until(prometheus, "SlotwiseRankDown", lambda: kill_worker(server))
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, 0))
            await until(
                prometheus, "SlotwiseJournalFailing", lambda: server.collect(ask(max_new_tokens=2))
            )
