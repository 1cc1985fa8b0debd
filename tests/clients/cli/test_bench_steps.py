from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from slotwise_cli import bench_steps as module
from slotwise_cli.bench_steps import _longest
from slotwise_cli.measure import decode_window
from slotwise_cli.output import CliError


@pytest.fixture
def own_server(served, monkeypatch, tmp_path):
    """The scripted server in the place of one of our own; keeps the flags it was started with."""
    started = []

    @contextlib.contextmanager
    def running(folder, flags, report):
        started.append(flags)
        yield served.address

    monkeypatch.setattr(module, "running_server", running)
    config = {
        "max_position_embeddings": 9000,
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "vocab_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, started


def steps(slotwise, folder, *words):
    few = ["--contexts", "16,64", "--concurrency", "1,2", "--steps", "2", "--repeats", "2"]
    return slotwise("bench", "steps", "--model", str(folder), *few, *words)


def test_a_point_per_context_and_concurrency(slotwise, own_server):
    folder, started = own_server
    done = steps(slotwise, folder, "--json", "--bandwidth", "10", "--device", "cpu")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [(point["context"], point["concurrency"]) for point in result["points"]] == [
        (16, 1),
        (16, 2),
        (64, 1),
        (64, 2),
    ]
    for point in result["points"]:
        assert point["step_ms"]["min"] <= point["step_ms"]["median"] <= point["step_ms"]["max"]
        rate = point["concurrency"] / point["step_ms"]["median"] * 1e3
        assert point["tokens_per_s"] == pytest.approx(rate)
    # 4 bytes x 2 (K and V) x 2 layers x 1 head x 4, at 10 GB/s
    per_token = 4 * 2 * 2 * 4 / 10e9 * 1e3
    shorter, longer = result["points"][1], result["points"][3]
    grown = longer["limit_step_ms"] - shorter["limit_step_ms"]
    assert grown == pytest.approx(2 * 48 * per_token)
    (flags,) = started
    assert flags == ["--device", "cpu", "--num-slots", "2", "--max-seq-len", str(64 + 2 + 4096)]


def test_people_get_a_table_and_files(slotwise, own_server, tmp_path):
    pytest.importorskip("matplotlib")
    folder, _ = own_server
    plot, json_file = tmp_path / "steps.png", tmp_path / "steps.json"
    done = steps(slotwise, folder, "--plot", str(plot), "--json-file", str(json_file))
    assert done.code == 0, done.err
    assert "ms/step" in done.out
    assert "limit" not in done.out, "nothing is known of this CPU's memory"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(json_file.read_text())["points"]) == 4


def test_room_is_what_the_model_has(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1000}')
    assert _longest(tmp_path, 900, 64) == 1000
    with pytest.raises(CliError, match="1000 positions"):
        _longest(tmp_path, 950, 64)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CliError, match="max_position_embeddings"):
        _longest(tmp_path, 900, 64)


def test_requests_that_never_meet_are_told(slotwise, own_server, monkeypatch):
    async def alone(*_):
        return [1.0]

    monkeypatch.setattr(module, "decode_window", alone)
    done = steps(slotwise, own_server[0])
    assert done.code == 1
    assert "2 requests of 16 tokens did not all decode at the same time" in done.err


async def test_a_window_asks_for_room_and_ends_its_requests(served):
    times = await decode_window(served.address, [[3, 4], [5, 6]], 2, 40)
    assert len(times) <= 2
    assert all(time > 0 for time in times)
    sent = [r for r in served.script.requests if r.DESCRIPTOR.name == "GenerateRequest"]
    assert [(r.ignore_eos, r.max_new_tokens) for r in sent] == [(True, 40)] * 2
    # The script has more words than were waited for.
    await asyncio.to_thread(served.script.ended.wait, 30)
    assert served.script.ended.is_set()
