from __future__ import annotations

import dataclasses
import re

from prometheus_client.parser import text_string_to_metric_families

from slotwise_client import Counters, Load, PrefixCache
from slotwise_gateway.metrics import Metrics


def numbered(kind, first: int, **given):
    """Every field has a number of its own."""
    names = [each.name for each in dataclasses.fields(kind) if each.name not in given]
    return kind(**given, **{name: first + place for place, name in enumerate(names)})


LOAD = numbered(
    Load,
    1,
    requests=numbered(Counters, 100),
    prefix_cache=numbered(PrefixCache, 200),
)


def samples(text: bytes) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_the_servers_load():
    found = samples(Metrics().text(LOAD))
    cache, requests = LOAD.prefix_cache, LOAD.requests
    expected = {
        "num_requests_running": LOAD.num_running,
        "num_requests_waiting": LOAD.num_waiting,
        "num_requests_unread": LOAD.num_unread,
        "num_slots": LOAD.num_slots,
        "max_num_requests_running": LOAD.max_running,
        "kv_cache_usage_perc": LOAD.num_used_tokens / LOAD.max_total_tokens,
        "num_pending_prefill_tokens": LOAD.num_pending_prefill_tokens,
        "engine_silence_seconds": LOAD.engine_silence_ns / 1e9,
        "prompt_tokens_total": LOAD.num_prompt_tokens,
        "generation_tokens_total": LOAD.num_generated_tokens,
        "engine_steps_total": LOAD.num_steps,
        "prefill_step_seconds_total": LOAD.prefill_step_ns / 1e9,
        "decode_step_seconds_total": LOAD.decode_step_ns / 1e9,
        "prefix_cache_queries_total": cache.num_queried_tokens,
        "prefix_cache_hits_total": cache.num_hit_tokens,
        "prefix_cache_evictions_total": cache.num_evicted_tokens,
        "prefix_cache_tokens": cache.num_cached_tokens,
        "requests_accepted_total": requests.accepted,
        "request_success_total{finished_reason=stop}": requests.stop,
        "request_success_total{finished_reason=length}": requests.length,
        "request_success_total{finished_reason=abort}": requests.cancelled,
        "request_failure_total{reason=deadline}": requests.deadline,
        "request_failure_total{reason=error}": requests.error,
        "admission_rejections_total{reason=invalid}": requests.rejected_invalid,
        "admission_rejections_total{reason=queue_full}": requests.rejected_full,
        "admission_rejections_total{reason=unavailable}": requests.rejected_unavailable,
        "corrupted_requests_total": requests.poisoned,
        "slow_readers_total": requests.slow_reader,
        "recoveries_total": LOAD.num_recoveries,
        "resumed_requests_total": LOAD.num_resumed,
    }
    ours = {name: value for name, value in found.items() if name.startswith("slotwise:")}
    assert ours == {f"slotwise:{name}": value for name, value in expected.items()}
    assert found["slotwise_gateway:server_up"] == 1


def test_the_gateways_own_counts():
    metrics = Metrics()
    for status in (200, 200, 400):
        metrics.count("/a", status)
    metrics.add_streams(2)
    metrics.add_streams(-1)
    found = samples(metrics.text(None))
    assert found == {
        "slotwise_gateway:requests_total{route=/a,status=200}": 2,
        "slotwise_gateway:requests_total{route=/a,status=400}": 1,
        "slotwise_gateway:open_streams": 1,
        "slotwise_gateway:server_up": 0,
    }


def test_a_server_without_slots():
    empty = dataclasses.replace(LOAD, max_total_tokens=0)
    assert samples(Metrics().text(empty))["slotwise:kv_cache_usage_perc"] == 0


def test_every_metric_is_described():
    text = Metrics().text(LOAD).decode()
    names = set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    types = set(re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", text, re.MULTILINE))
    assert names == types
