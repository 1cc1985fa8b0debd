"""Figures and files of benchmarks; of docs/benchmarks.md this, with results made here:

slotwise bench report ladder.json arrivals.json --report all.html
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from slotwise_cli import bench_files, compare, result_file
from slotwise_cli.arrivals import (
    Goodput,
    Lengths,
    Objective,
    Outcome,
    poisson,
    sender_was_bottleneck,
)
from slotwise_cli.figures import Figure, interval
from slotwise_cli.latency import Timeline, latencies
from slotwise_cli.output import CliError
from slotwise_cli.server_groups import groups_of, measure_groups

TWO = Lengths(16, 256)


def outcome(ttft_s: float, *gaps_s: float, fate="ended", late_s=0.0, counted=True) -> Outcome:
    at, arrivals = ttft_s, [(ttft_s, 1)]
    for gap in gaps_s:
        at += gap
        arrivals.append((at, 1))
    return Outcome(Timeline(0.0, tuple(arrivals)), late_s, fate, counted)


def test_time_per_token_leaves_the_first_one_out():
    one = Timeline(1.0, ((1.5, 1), (1.7, 2), (2.5, 1)))
    assert (one.ttft_ms, one.e2e_ms) == (500, 1500)
    # (1500 - 500) / (4 - 1)
    assert one.tpot_ms == pytest.approx(1000 / 3)
    assert one.itl_ms == pytest.approx([100, 100, 800])
    assert Timeline(0.0, ((1.0, 1),)).tpot_ms is None


def test_nothing_ended_is_no_division_by_zero():
    assert latencies([]) == {"ttft_ms": [], "itl_ms": [], "tpot_ms": [], "e2e_ms": []}
    assert Goodput.of([], Objective(), 5.0).share is None
    assert Goodput.of([], Objective(), 5.0).rate == 0
    assert not sender_was_bottleneck([])


def test_arrivals_are_of_the_rate_and_the_seed():
    plan = poisson(50.0, 200.0, TWO, Lengths(8, 8), seed=3)
    assert plan == poisson(50.0, 200.0, TWO, Lengths(8, 8), seed=3)
    assert plan != poisson(50.0, 200.0, TWO, Lengths(8, 8), seed=4)
    # 10,000 are expected; the standard deviation is 100.
    assert abs(len(plan) - 10_000) < 500
    gaps = [b.at - a.at for a, b in pairwise(plan)]
    # Of an exponential distribution exp(-1) is longer than the mean.
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
    assert {one.new_tokens for one in plan} == {8}
    assert (min(o.prompt_tokens for o in plan), max(o.prompt_tokens for o in plan)) == (16, 256)


@pytest.mark.parametrize("text", ["", "0", "5-4", "a", "3-", "-3", "1-2-3"])
def test_a_length_is_a_number_or_two(text):
    with pytest.raises(CliError, match="16-256"):
        Lengths.parse("--prompt-tokens", text)


def test_goodput_counts_who_kept_every_bound():
    outcomes = [
        outcome(0.1, 0.01, 0.01),
        outcome(0.3, 0.01),  # the first token was late
        outcome(0.1, 0.01, 0.09),  # a gap was long
        outcome(0.1, 0.01, fate="timeout"),
        outcome(0.1, 0.01, fate="refused"),
        outcome(0.1, 0.01, counted=False),
    ]
    good = Goodput.of(outcomes, Objective(ttft_ms=200, itl_ms=50), 2.0)
    assert (good.num_good, good.num_counted) == (1, 5)
    assert (good.share, good.rate) == (0.2, 0.5)
    assert Goodput.of(outcomes, Objective(), 2.0).num_good == 3
    assert Goodput.of(outcomes, Objective(tpot_ms=49), 2.0).num_good == 2
    assert Goodput.of(outcomes, Objective(e2e_ms=150), 2.0).num_good == 1


def test_a_late_sender_is_told():
    late, punctual = outcome(0.1, late_s=0.02), outcome(0.1, late_s=0.009)
    assert sender_was_bottleneck([late] * 10)
    assert not sender_was_bottleneck([punctual] * 10)
    # 20 ms of a second are no tenth.
    assert not sender_was_bottleneck([outcome(1.0, late_s=0.02)] * 10)


def test_the_interval_is_of_order_statistics():
    assert interval([5.0]) == (5.0, 5.0, 0.0)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0, 0.75)
    # Of ten, the second and the ninth: 1 - 2 (1 + 10) / 1024.
    assert interval([float(n) for n in range(10)]) == (1.0, 8.0, 1 - 22 / 1024)
    figure = Figure("ms", "lower", (4.0, 1.0, 2.0)).as_json()
    assert (figure["median"], figure["min"], figure["max"]) == (2.0, 1.0, 4.0)
    assert figure["rounds"] == [4.0, 1.0, 2.0]


def result(kind="arrivals", **figures: tuple[str, tuple[float, ...]]) -> dict:
    of = {name: Figure("ms", better, rounds) for name, (better, rounds) in figures.items()}
    whole = result_file.result_head(kind, {"cpu": "x", "num_cores": 2}, {"model": "m"})
    return {**whole, "figures": result_file.figures_json(of)}


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return str(path)

    return write


def test_figures_are_compared_with_both_spreads(slotwise, write):
    before = result(
        fast=("lower", (10.0, 11.0, 12.0)),
        same=("lower", (10.0, 11.0, 12.0)),
        rate=("higher", (10.0, 10.0, 10.0)),
        once=("lower", (1.0,)),
    )
    after = result(
        fast=("lower", (20.0, 22.0, 24.0)),
        same=("lower", (12.0, 13.0, 14.0)),
        rate=("higher", (15.0, 15.0, 15.0)),
        once=("lower", (9.0,)),
    )
    after["setup"]["model"] = "other"
    a, b = write("a.json", before), write("b.json", after)
    done = slotwise("bench", "compare", a, b, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["differing"] == ["setup.model: m / other"]
    by_name = {one["name"]: one for one in told["figures"]}
    assert {name: one["verdict"] for name, one in by_name.items()} == {
        "fast": "worse",
        "same": "same",
        "rate": "better",
        "once": "not known",
    }
    assert (by_name["fast"]["ratio"], by_name["fast"]["worse_percent"]) == (2.0, 100.0)
    assert by_name["rate"]["worse_percent"] == -50.0
    assert slotwise("bench", "compare", a, b, "--fail-if-worse", "99").code == 1
    assert slotwise("bench", "compare", a, b, "--fail-if-worse", "101").code == 0
    assert "worse by 100.0 %" in slotwise("bench", "compare", a, b).out


def test_other_kinds_and_other_files_are_refused(slotwise, write):
    a, b = write("a.json", result(x=("lower", (1.0,)))), write("b.json", result("ladder"))
    done = slotwise("bench", "compare", a, b)
    assert done.code == 2
    assert "`bench arrivals`" in done.err
    done = slotwise("bench", "compare", a, write("c.json", {"levels": []}))
    assert done.code == 1
    assert result_file.SCHEMA in done.err


def test_figures_of_zero_have_no_ratio():
    a, b = result(x=("lower", (0.0, 0.0))), result(x=("lower", (1.0, 1.0)))
    (one,) = compare.compare_figures(a, b)
    assert (one.ratio, one.worse_percent, one.verdict) == (None, None, "worse")


def test_a_file_is_written_whole_or_left(monkeypatch, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_space)
        with pytest.raises(OSError, match="No space"):
            result_file.write_whole(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "old"
    result_file.write_whole(path, b"new")
    assert path.read_text() == "new"


def _no_space(handle):
    raise OSError(28, "No space left on device")


def test_a_result_that_finds_no_room_is_kept_elsewhere(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_files, "write_whole", lambda path, data: _no_space(0))
    monkeypatch.setattr(bench_files.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CliError, match="No space left on device; the result is in") as told:
        bench_files.write_json_file(tmp_path / "a.json", {"a": 1})
    assert json.loads(Path(told.value.message.rsplit(" ", 1)[1]).read_text()) == {"a": 1}
    monkeypatch.setattr(bench_files.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(CliError, match="on stdout"):
        bench_files.write_json_file(tmp_path / "a.json", {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_the_spread_holds_from_server_to_server():
    # Medians of the servers: 100, 104, 102; their mean 102, deviation 2, t 4.303.
    figure = Figure("ms", "lower", (99.0, 101.0, 104.0, 104.0, 102.0), (0, 0, 1, 1, 2))
    half = 4.303 * 2 / math.sqrt(3)
    assert figure.spread == pytest.approx((102 - half, 102 + half))
    # The median and 3 % of it.
    assert Figure("ms", "lower", (100.0, 100.0), (0, 1)).spread == (97.0, 103.0)
    # One server: its rounds.
    assert Figure("ms", "lower", (80.0, 100.0, 130.0)).spread == (80.0, 130.0)
    # No time is below zero.
    assert Figure("ms", "lower", (0.1, 50.0), (0, 1)).spread[0] == 0
    assert Figure.read(figure.as_json()) == figure


def test_two_runs_that_differ_by_less_than_their_servers_are_the_same():
    before, after = (
        Figure("ms", "lower", rounds, (0, 0, 1, 1, 2, 2)).as_json()
        for rounds in ((10.0, 10.1, 11.0, 11.1, 12.0, 12.1), (12.5, 12.6, 13.0, 13.1, 13.5, 13.6))
    )
    one = compare.compare_figures({"figures": {"x": before}}, {"figures": {"x": after}})[0]
    assert one.verdict == "same"
    for figure in (before, after):
        del figure["servers"]
    one = compare.compare_figures({"figures": {"x": before}}, {"figures": {"x": after}})[0]
    assert one.verdict == "worse"


@pytest.mark.parametrize(
    ("repeats", "servers", "sizes"), [(6, 3, [2, 2, 2]), (5, 3, [1, 2, 2]), (2, 3, [1, 1])]
)
def test_rounds_are_shared_among_servers(repeats, servers, sizes):
    groups = groups_of(repeats, servers)
    assert [len(group.rounds) for group in groups] == sizes
    assert [number for group in groups for number in group.rounds] == list(range(repeats))


def test_a_server_that_does_not_start_again_leaves_the_rounds_before():
    begun: list[int] = []

    @contextlib.contextmanager
    def start():
        if begun:
            raise CliError("no port")
        yield "here"

    def measure(address, group):
        begun.append(group.server)

    ended = measure_groups(groups_of(3, 3), start, measure)
    assert begun == [0]
    assert isinstance(ended, CliError)
    with pytest.raises(CliError, match="no port"):
        measure_groups(groups_of(1, 1), start, measure)


def test_results_are_joined_into_one_page(slotwise, write, tmp_path):
    pytest.importorskip("matplotlib")
    kinds = [
        write(f"{name}.json", result(name, x=("lower", (1.0, 2.0)))) for name in ("one", "two")
    ]
    for path in kinds:
        whole = json.loads(Path(path).read_text())
        whole["setup"] |= {"device": "cpu", "weight_dtype": "float32", "tp": 1}
        Path(path).write_text(json.dumps(whole))
    page = tmp_path / "all.html"
    done = slotwise("bench", "report", *kinds, "--report", str(page))
    assert done.code == 0, done.err
    text = page.read_text()
    assert text.index("<h2>one</h2>") < text.index("<h2>two</h2>")
    assert text.count("data:image/png") == 2
    assert slotwise("bench", "report", *kinds).code == 2


def test_a_disk_that_fills_up_leaves_the_result_elsewhere(slotwise, write, monkeypatch, tmp_path):
    figures = {f"x{number}": ("lower", (1.0, 2.0)) for number in range(200)}
    a = write("a.json", result(**figures))
    monkeypatch.setattr(bench_files.tempfile, "tempdir", str(tmp_path))
    with small_disk(tmp_path / "disk", 16 << 10) as disk:
        done = slotwise("bench", "compare", a, a, "--json-file", str(disk / "c.json"))
        assert list(disk.iterdir()) == []
    assert done.code == 1
    assert "No space left on device; the result is in" in done.err
    kept = json.loads(Path(done.err.split()[-1]).read_text())
    assert len(kept["figures"]) == 200


@contextlib.contextmanager
def small_disk(folder, size):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
