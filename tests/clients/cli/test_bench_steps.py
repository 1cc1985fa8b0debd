from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

import pytest

from slotwise_cli import bench_steps as module
from slotwise_cli import measure
from slotwise_cli.bench_steps import _longest
from slotwise_cli.measure import decode_window
from slotwise_cli.output import CliError
from slotwise_client import Delta


@pytest.fixture
def own_server(served, monkeypatch, tmp_path):
    """The scripted server in the place of one of our own; keeps the flags it was started with.

    Its streams are over at once, so that two need not meet: the window's times are told here, the
    first, warm-up, far off.
    """
    started = []
    rounds = itertools.cycle([9000.0, 2.0, 4.0])

    async def window(address, prompts, num_steps, room):
        assert address == served.address
        assert room == 64 + 2 + 4096 - len(prompts[0])
        return [next(rounds)] * len(prompts)

    @contextlib.contextmanager
    def running(folder, flags, report):
        started.append(flags)
        yield served.address

    monkeypatch.setattr(module, "running_server", running)
    monkeypatch.setattr(module, "decode_window", window)
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
        assert point["step_ms"] == {"median": 3.0, "min": 2.0, "max": 4.0}
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


class Schedule:
    """Streams whose tokens come at told times: [(time, index of the request)], in order."""

    def __init__(self, *arrivals):
        self.arrivals = arrivals
        self.now = 0.0
        self.closed = []
        self.queues = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.player.cancel()

    def generate(self, prompt, **options):
        self.queues.append(asyncio.Queue())
        if len(self.queues) == 2:
            self.player = asyncio.ensure_future(self.play())
        return Stream(self, len(self.queues) - 1)

    async def play(self):
        for at, index in self.arrivals:
            self.now = at
            self.queues[index].put_nowait(Delta("r", 0, 0, (7,), ""))
            for _ in range(10):
                await asyncio.sleep(0)


class Stream:
    def __init__(self, schedule, index):
        self.schedule, self.index = schedule, index

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.schedule.closed.append(self.index)

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await self.schedule.queues[self.index].get()


async def test_only_steps_while_all_decode_are_timed(monkeypatch):
    # Request 0 has tokens every 10 s while the other one is read, then both every second.
    alone = [(10.0, 0), (20.0, 0), (30.0, 0)]
    both = [(at, index) for at in (40.0, 41.0, 42.0, 43.0, 44.0) for index in (1, 0)]
    schedule = Schedule(*alone, *both)
    monkeypatch.setattr(measure, "AsyncClient", lambda address: schedule)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: schedule.now)
    times = await asyncio.wait_for(decode_window("", [[1], [2]], 3, 99), 60)
    assert times == [1000.0, 1000.0]
    assert sorted(schedule.closed) == [0, 1]
    assert schedule.now == 43.0, "requests end when the steps are there"
