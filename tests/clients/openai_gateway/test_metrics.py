from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from slotwise_gateway.metrics import Metrics


def samples(text: bytes) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_the_servers_text_follows():
    text = Metrics().text(b"slotwise:num_requests_running 3.0\n")
    found = samples(text)
    assert found["slotwise:num_requests_running"] == 3
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


def test_every_metric_is_described():
    text = Metrics().text(None).decode()
    names = set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    types = set(re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", text, re.MULTILINE))
    assert names == types
