"""`slotwise serve demo --metrics-port 9400`, and `curl http://127.0.0.1:9400/metrics`."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from free_ports import fixed_port
from prometheus_client.parser import text_string_to_metric_families

from checkpoints import make_checkpoint
from slotwise_cli.output import report_nothing
from slotwise_cli.server_process import running_server
from slotwise_client import Client


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=512)


def test_the_port_and_the_call_tell_the_same(tiny):
    port = fixed_port()
    with running_server(tiny, ["--metrics-port", str(port)], report_nothing) as address:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            scraped = answer.read().decode()
        with Client(address) as client:
            called = client.metrics().decode()
    names = [
        {family.name for family in text_string_to_metric_families(text)}
        for text in (scraped, called)
    ]
    assert names[0] == names[1]
    assert "slotwise:generation_tokens" in names[0]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
