from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from slotwise_cli.measure import Level, Run, Timeline
from slotwise_cli.service_times import ServiceTimes, read_ladder
from slotwise_cli.simulation_plot import plot_simulation

# Some hundred requests.
SMALL = ("simulate", "--replicas", "2", "--duration", "10", "--warm-up", "5", "--pause", "1")
LADDER = {
    "model": "tiny",
    "weight_dtype": "float32",
    "device": "cpu",
    "prompt_tokens": 32,
    "new_tokens": 128,
    "levels": [
        {"concurrency": 4, "decode_tokens_per_s": {"median": 200.0}, "ttft_ms_p50": 100.0},
        {"concurrency": 1, "decode_tokens_per_s": {"median": 100.0}, "ttft_ms_p50": 64.0},
    ],
}


def test_a_step_is_as_measured_and_a_line_between():
    times = ServiceTimes(steps=((1, 0.010), (4, 0.016)), step_context=100, context_token_s=1e-6)
    assert times.step_s(0, 0) == 0
    assert times.step_s(1, 100) == 0.010
    assert times.step_s(3, 300) == pytest.approx(0.014)
    # Beyond the last one measured the line goes on.
    assert times.step_s(8, 800) == pytest.approx(0.024)
    assert times.step_s(4, 1400) == pytest.approx(0.017)


def test_the_defaults_are_what_the_readme_has():
    """Prompts of 8K and 16K, their first tokens; eight of 8K that decode."""
    times = ServiceTimes()
    assert times.prefill_s(0, 8192) + times.overhead_s == pytest.approx(0.210, rel=0.02)
    assert times.prefill_s(0, 16384) + times.overhead_s == pytest.approx(0.509, rel=0.02)
    assert times.prefill_s(0, 512) + times.overhead_s == pytest.approx(0.0143, rel=0.02)
    assert times.step_s(8, 8 * 8192) == pytest.approx(6.6e-3, rel=0.02)
    assert 1 / times.step_s(1, 8192) == pytest.approx(220, rel=0.06)


def test_a_ladder_is_read(tmp_path):
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(LADDER))
    times = read_ladder(path)
    assert times.name == "tiny, float32, cpu"
    assert times.steps == ((1, 0.010), (4, 0.020))
    assert times.prefill_s(0, 64) == pytest.approx(0.128)


def test_the_levels_are_those_of_bench_ladder(tmp_path):
    """Ten tokens, a step of 20 ms, the first token after 100."""
    arrivals = tuple((0.1 + 0.02 * token, 1) for token in range(10))
    level = Level.of(1, [Run((Timeline(0.0, arrivals),), 0.5)])
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({**LADDER, "levels": [asdict(level)]}))
    times = read_ladder(path)
    assert times.step_s(1, 0) == pytest.approx(0.02)
    assert times.prefill_s(0, 32) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"levels": []}', json.dumps({**LADDER, "levels": LADDER["levels"][:1]})],
)
def test_what_is_no_ladder_is_refused_by_its_name(slotwise, tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    ended = slotwise(*SMALL, "--ladder", str(path))
    assert ended.code == 1
    assert str(path) in ended.err


def test_rates_and_routings(slotwise, tmp_path):
    file = tmp_path / "result.json"
    words = ("--rate", "4,8", "--routing", "hash,random", "--mtbf-hours", "0.002", "--json")
    ended = slotwise(*SMALL, *words, "--json-file", str(file))
    assert ended.code == 0
    result = json.loads(ended.out)
    assert result == json.loads(file.read_text())
    assert [(p["routing"], p["rate"]) for p in result["points"]] == [
        ("hash", 4),
        ("hash", 8),
        ("random", 4),
        ("random", 8),
    ]
    hashed, _, spread, _ = result["points"]
    assert min(hashed["num_requests"], spread["num_requests"]) > 20
    # Some seven seconds between failures of each of two.
    assert hashed["num_failures"] > 0


def test_the_most_that_keeps_the_objective(slotwise):
    """One slot, a step of 4 ms, answers of 100 tokens: some 2.5 a second; with little wait far
    fewer."""
    words = ("--max-running", "1", "--turns", "1", "--output-tokens", "100", "--prompt-tokens", "9")
    words += (
        "--replicas",
        "1",
        "--routing",
        "least",
        "--duration",
        "200",
        "--warm-up",
        "1",
        "--json",
    )
    loose, tight = (
        json.loads(slotwise("simulate", *words, "--slo-ttft-ms", limit).out)["points"][0]
        for limit in ("20000", "500")
    )
    assert 0.1 <= tight["rate"] < 0.5 < 1.5 < loose["rate"] < 2.6
    assert tight["goodput"] >= 0.99
    assert tight["ttft_p99_s"] <= 0.5


def test_an_objective_that_nobody_keeps(slotwise):
    ended = slotwise(*SMALL, "--slo-ttft-ms", "1")
    assert ended.code == 1
    assert "--slo-ttft-ms" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--routing", "round"), "hash, least, random"),
        (("--rate", "fast"), "1,2.5,4"),
        (("--rate", "0"), "1,2.5,4"),
        (("--num-slots", "8"), "--max-running 64"),
        (("--rate", "1,1e300"), "--rate 1e+300 over 15 s"),
        (("--num-slots", "99999999999999"), "2 replicas of 99999999999999 slots"),
        (("--max-running", "9999999"), "2 replicas of 39999996 slots"),
    ],
)
def test_what_cannot_be_is_refused(slotwise, words, said):
    ended = slotwise(*SMALL, *words)
    assert ended.code == 2
    assert said in ended.err


def test_the_table_has_a_row_for_each(slotwise):
    ended = slotwise(*SMALL, "--rate", "4", "--routing", "hash,least")
    assert ended.out.startswith("2 replicas of Qwen3-8B")
    assert [line.split()[0] for line in ended.out.splitlines() if line.strip()][-2:] == [
        "hash",
        "least",
    ]


def test_a_picture_also_where_nothing_was_served(tmp_path):
    point = {"routing": "hash", "rate": 1.0, "goodput": None, "ttft_p99_s": None, "hit_rate": None}
    result = {
        "fleet": {"num_replicas": 1},
        "service_times": {"name": "x"},
        "objective": {"time_to_first_token_s": 0.5},
        "points": [point, {**point, "rate": 2.0, "goodput": 1.0, "ttft_p99_s": 0.1}],
    }
    path = tmp_path / "plot.png"
    plot_simulation(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")
