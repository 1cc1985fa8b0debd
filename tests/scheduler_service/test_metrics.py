"""The text for Prometheus, and the port that it is scraped from."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler_service.config import ConfigError
from scheduler_service.engine_types import EngineState, Load, RankLoad
from scheduler_service.errors import UnavailableError
from scheduler_service.latencies import Latencies, Sizes
from scheduler_service.limits import Counters, PrefixCacheCounters
from scheduler_service.metrics import Metrics
from scheduler_service.metrics_port import KEPT_S, MAX_CONNECTIONS, metrics_port
from scheduler_service.prefix_index import PrefixReuse
from scheduler_service.record import JournalState
from scheduler_service.service import Rejections

GIB = 1 << 30


def numbered(kind, first: int, **given):
    """Every field has a number of its own."""
    names = [each.name for each in dataclasses.fields(kind) if each.name not in given]
    return kind(**given, **{name: first + place for place, name in enumerate(names)})


def make_load() -> Load:
    counters = numbered(
        Counters,
        100,
        prefix_cache=numbered(PrefixCacheCounters, 200),
        latencies=Latencies(),
        sizes=Sizes(),
    )
    counters.latencies.time_to_first_token.observe(20_000_000)
    counters.latencies.inter_token_latency.observe_parts(9_000_000, 3)
    counters.sizes.request_prompt_tokens.observe(17)
    reports = [
        SimpleNamespace(
            rank=rank,
            device=f"cuda:{rank}",
            measured_memory_bytes=(rank + 1) * GIB,
            device_memory_bytes=80 * GIB,
        )
        for rank in range(2)
    ]
    ranks = tuple(RankLoad(one, is_up=one.rank == 0) for one in reports)
    return numbered(Load, 1, state=EngineState.READY, ranks=ranks, counters=counters)


class Engine:
    def __init__(self, load: Load | None) -> None:
        self.state = EngineState.STARTING if load is None else load.state
        self._load = load

    def info(self):
        if self._load is None:
            raise UnavailableError("starting")
        geometry = SimpleNamespace(
            num_slots=8,
            max_running=4,
            max_seq_len=64,
            kv_dtype="float32",
            weight_dtype="float16",
            prefix_reuse=PrefixReuse.ALL,
            device_name="cpu",
        )
        return SimpleNamespace(geometry=geometry, workers=(0, 1))

    def load(self):
        return self._load


def following(load: Load | None) -> Metrics:
    metrics = Metrics()
    metrics.follow(
        SimpleNamespace(
            engine=Engine(load),
            version="1.2",
            model=SimpleNamespace(info=SimpleNamespace(name='a "model"')),
            survival=SimpleNamespace(journal_state=JournalState.ON),
            rejections=Rejections(invalid=301, full=302, unavailable=303),
            calls=SimpleNamespace(num_unread=304),
            num_slow_readers=305,
            num_resumed=306,
        )
    )
    return metrics


def samples(text: bytes) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_what_the_server_tells():
    load = make_load()
    counters, cache = load.counters, load.counters.prefix_cache
    expected = {
        "server_state{state=starting}": 0,
        "server_state{state=ready}": 1,
        "server_state{state=recovering}": 0,
        "server_state{state=down}": 0,
        "server_state{state=draining}": 0,
        'build_info{model=a "model",version=1.2}': 1,
        "cache_config_info{device_name=cpu,kv_dtype=float32,max_running=4,max_seq_len=64,"
        "num_slots=8,prefix_reuse=all,weight_dtype=float16,world_size=2}": 1,
        "journal_state{state=off}": 0,
        "journal_state{state=on}": 1,
        "journal_state{state=failing}": 0,
        "admission_rejections_total{reason=invalid}": 301,
        "admission_rejections_total{reason=queue_full}": 302,
        "admission_rejections_total{reason=unavailable}": 303,
        "num_requests_unread": 304,
        "slow_readers_total": 305,
        "resumed_requests_total": 306,
        "epoch": load.epoch,
        "rank_up{device=cuda:0,rank=0}": 1,
        "rank_up{device=cuda:1,rank=1}": 0,
        "rank_memory_bytes{device=cuda:0,rank=0}": GIB,
        "rank_memory_bytes{device=cuda:1,rank=1}": 2 * GIB,
        "rank_device_memory_bytes{device=cuda:0,rank=0}": 80 * GIB,
        "rank_device_memory_bytes{device=cuda:1,rank=1}": 80 * GIB,
        "recoveries_total": load.num_recoveries,
        "num_requests_running": load.num_running,
        "num_requests_waiting": load.num_waiting,
        "oldest_waiting_seconds": load.oldest_waiting_ns / 1e9,
        "num_slots": load.num_slots,
        "max_num_requests_running": load.max_running,
        "kv_cache_usage_perc": load.num_used_tokens / load.max_total_tokens,
        "prefix_cache_tokens": load.num_cached_tokens,
        "num_pending_prefill_tokens": load.num_pending_prefill_tokens,
        "engine_silence_seconds": load.engine_silence_ns / 1e9,
        "requests_accepted_total": counters.accepted,
        "prompt_tokens_total": counters.num_prompt_tokens,
        "prompt_tokens_cached_total": counters.num_cached_prompt_tokens,
        "generation_tokens_total": counters.num_generated_tokens,
        "engine_steps_total": counters.num_steps,
        "prefill_step_seconds_total": counters.prefill_step_ns / 1e9,
        "decode_step_seconds_total": counters.decode_step_ns / 1e9,
        "prefix_cache_queries_total": cache.num_queried_tokens,
        "prefix_cache_hits_total": cache.num_hit_tokens,
        "prefix_cache_copied_tokens_total": cache.num_copied_tokens,
        "prefix_cache_evictions_total": cache.num_evicted_tokens,
        "request_success_total{finished_reason=stop}": counters.stop,
        "request_success_total{finished_reason=length}": counters.length,
        "request_success_total{finished_reason=abort}": counters.cancelled,
        "request_failure_total{reason=deadline}": counters.deadline,
        "request_failure_total{reason=error}": counters.error,
        "corrupted_requests_total": counters.corrupted,
        "poisoned_requests_total": counters.poisoned,
    }
    found = samples(following(load).text())
    ours = {
        name.removeprefix("slotwise:"): value
        for name, value in found.items()
        if name.startswith("slotwise:") and not re.search(r"_(bucket|count|sum)\b", name)
    }
    assert ours == expected


def test_histograms():
    found = samples(following(make_load()).text())
    ttft = "slotwise:time_to_first_token_seconds"
    assert found[f"{ttft}_bucket{{le=0.015}}"] == 0
    assert found[f"{ttft}_bucket{{le=0.02}}"] == found[f"{ttft}_bucket{{le=+Inf}}"] == 1
    assert (found[f"{ttft}_count"], found[f"{ttft}_sum"]) == (1, 0.02)
    itl = "slotwise:inter_token_latency_seconds"
    assert found[f"{itl}_bucket{{le=0.002}}"] == 0
    assert (found[f"{itl}_bucket{{le=0.003}}"], found[f"{itl}_sum"]) == (3, 0.009)
    assert found["slotwise:request_prompt_tokens_bucket{le=64}"] == 1
    assert found["slotwise:request_prompt_tokens_bucket{le=16}"] == 0
    for suffix in (
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_generation_tokens",
        "iteration_tokens_total",
    ):
        assert found[f"slotwise:{suffix}_count"] == 0


def test_before_there_is_a_model_and_before_there_are_workers():
    for metrics in (Metrics(), following(None)):
        found = samples(metrics.text())
        assert found["slotwise:server_state{state=starting}"] == 1
        assert found["slotwise_process_resident_memory_bytes"] > 0
        assert "slotwise:num_requests_running" not in found
    assert found["slotwise:admission_rejections_total{reason=unavailable}"] == 303


def test_a_server_without_positions():
    empty = dataclasses.replace(make_load(), max_total_tokens=0)
    assert samples(following(empty).text())["slotwise:kv_cache_usage_perc"] == 0


def test_every_metric_is_described():
    text = following(make_load()).text().decode()
    assert set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE)) == set(
        re.findall(r"^# TYPE (\S+) (?:gauge|counter|histogram)$", text, re.MULTILINE)
    )


async def say(address: str, data: bytes) -> bytes:
    """All that is answered until the connection ends."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


async def test_the_port():
    async with metrics_port("127.0.0.1", 0, lambda: b"a 1\n") as address:
        answer = await say(address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Length: 4" in head
        assert b"version=0.0.4" in head
        assert body == b"a 1\n"
        answer = await say(address, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert b"Content-Length: 4" in answer
        assert answer.endswith(b"\r\n\r\n")
        assert b" 404 " in await say(address, b"GET / HTTP/1.1\r\n\r\n")
        assert b" 405 " in await say(address, b"POST /metrics HTTP/1.1\r\n\r\n")


async def test_who_sends_nonsense_or_nothing_keeps_nobody_else_out():
    async with metrics_port("127.0.0.1", 0, lambda: b"a 1\n") as address:
        host, _, port = address.rpartition(":")
        silent = [
            await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS - 1)
        ]
        silent[0][1].write(b"GET /metr")
        assert await say(address, b"x" * 20_000) == b""
        assert b"a 1" in await say(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        for _, writer in silent:
            writer.close()


async def test_who_never_ends_a_request_is_cut(monkeypatch):
    monkeypatch.setattr("scheduler_service.metrics_port._TIMEOUT_S", 0.05)
    async with metrics_port("127.0.0.1", 0, lambda: b"a 1\n") as address, asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            assert await say(address, b"GET /metrics HTTP/1.1\r\nX: ") == b""


async def test_who_asks_without_a_pause_gets_what_there_is():
    """A hundred in a row cost a look each 0.1 s; later it is told anew."""
    looks = itertools.count(1)
    async with metrics_port("127.0.0.1", 0, lambda: b"a %d\n" % next(looks)) as address:

        async def scrape() -> bytes:
            answer = await say(address, b"GET /metrics HTTP/1.1\r\n\r\n")
            return answer.partition(b"\r\n\r\n")[2]

        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        answers = [await scrape() for _ in range(100)]
        assert int(answers[-1].split()[1]) <= 1 + (loop.time() - begin_s) / KEPT_S
        async with asyncio.timeout(60):
            while await scrape() == answers[-1]:
                pass


async def test_metrics_that_fail_end_nothing(caplog):
    def fail() -> bytes:
        raise ValueError("a bug")

    async with metrics_port("127.0.0.1", 0, fail) as address:
        assert b" 500 " in await say(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b" 500 " in await say(address, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert "a bug" in caplog.text


async def test_a_port_that_is_taken_is_named():
    async with metrics_port("127.0.0.1", 0, lambda: b"") as address:
        port = address.rpartition(":")[2]
        with pytest.raises(
            ConfigError, match=rf"metrics_port.*127\.0\.0\.1:{port}.*--metrics-port"
        ):
            async with metrics_port("127.0.0.1", int(port), lambda: b""):
                pass
