from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from slotwise_cli import bench, limits
from slotwise_cli.geometry import model_config
from slotwise_cli.latency import Timeline
from slotwise_cli.measure import Level, Run, Work
from slotwise_cli.output import CliError, report_nothing
from worker import rank


def test_a_running_server_is_measured(slotwise, served):
    words = ["bench", "ladder", "--concurrency", "1,2", "--repeats", "2", "--new-tokens", "5"]
    done = slotwise(*words, "--json", "--server", served.address)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [level["concurrency"] for level in result["levels"]] == [1, 2]
    one, two = result["levels"]
    assert one["ratio_to_one"] == 1.0
    ratio = two["tokens_per_s"]["median"] / one["tokens_per_s"]["median"]
    assert two["ratio_to_one"] == pytest.approx(ratio)
    assert (result["model"], result["weight_dtype"], result["tp"]) == ("script", "float32", 1)


def test_the_table_has_a_line_per_concurrency(slotwise, served):
    words = ["bench", "ladder", "--concurrency", "1,2", "--repeats", "1", "--new-tokens", "5"]
    done = slotwise(*words, "--server", served.address)
    assert done.code == 0, done.err
    assert "median of 1" in done.out
    assert "TTFT" in done.out


def test_without_one_at_once_there_is_no_ratio(slotwise, served):
    words = ["bench", "ladder", "--concurrency", "2", "--repeats", "1", "--new-tokens", "5"]
    result = json.loads(slotwise(*words, "--json", "--server", served.address).out)
    assert result["levels"][0]["ratio_to_one"] is None


def test_engine_and_peer_stand_beside_the_server():
    level = {"concurrency": 1, "wall_ms": {"median": 1050.0}, "tokens_per_s": {"median": 40.0}}
    result = {"new_tokens": 50, "levels": [level]}
    bench._add_engine(result, {1: [1000.0, 900.0, 1100.0]})
    assert level["grpc_time_ratio"] == pytest.approx(1.05)
    assert level["in_process_tokens_per_s"]["median"] == pytest.approx(50)
    answer = {
        "version": "9",
        "tokens_per_s": [16.0, 15.0, 17.0],
        "ttft_ms": [5.0],
        "num_threads": 2,
    }
    bench._add_peer(result, answer)
    assert result["peer"]["ratio_at_one"] == pytest.approx(2.5)


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,,2", "-1"])
def test_concurrency_is_a_list_of_numbers(slotwise, text):
    done = slotwise("bench", "ladder", "--concurrency", text)
    assert done.code == 2
    assert "1,2,4,8" in done.err


def test_settings_of_a_running_server_cannot_be_chosen(slotwise, served):
    for flag, value in (("--dtype", "bfloat16"), ("--model", "demo")):
        done = slotwise("bench", "ladder", flag, value, "--server", served.address)
        assert done.code == 2
        assert flag in done.err


def test_an_unknown_peer_is_refused_before_work(slotwise):
    assert slotwise("bench", "ladder", "--peer", "abacus").code == 2


def test_a_missing_peer_says_how_to_get_it(slotwise, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    done = slotwise("bench", "ladder", "--peer", "transformers")
    assert done.code == 1
    assert "pip install transformers" in done.err


def test_a_helper_that_fails_gives_its_last_line():
    command = [sys.executable, "-c", "import sys; sys.exit('first\\nworker: no such model')"]
    with pytest.raises(CliError, match="worker: no such model"):
        bench.run_json(command)


def test_the_exit_status_of_a_refusal_is_passed_on():
    with pytest.raises(CliError) as refused:
        bench.run_json([sys.executable, "-c", "import sys; print('no', file=sys.stderr); exit(2)"])
    assert refused.value.exit_code == 2


def test_files_are_written_beside_the_table(slotwise, served, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["bench", "ladder", "--concurrency", "1,2", "--repeats", "1", "--output-tokens", "5"]
    json_file, plot = tmp_path / "ladder.json", tmp_path / "ladder.png"
    files = ["--json-file", str(json_file), "--plot", str(plot)]
    done = slotwise(*words, *files, "--server", served.address)
    assert done.code == 0, done.err
    assert "by diff" in done.out
    assert [row["concurrency"] for row in json.loads(json_file.read_text())["levels"]] == [1, 2]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["ladder", "steps"])
def test_files_that_could_not_be_written_are_told_before_work(slotwise, tmp_path, command):
    for flag in ("--plot", "--json-file"):
        done = slotwise("bench", command, flag, str(tmp_path / "none" / "file"))
        assert done.code == 1
        assert f"no folder '{tmp_path}/none'" in done.err


def test_a_plot_without_matplotlib_says_how_to_get_it(slotwise, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    done = slotwise("bench", "ladder", "--plot", str(tmp_path / "a.png"))
    assert done.code == 1
    assert "pip install 'slotwise[plot]'" in done.err


def test_the_same_prompts_for_one_token_give_the_rate_by_difference(slotwise, served):
    words = ["bench", "ladder", "--concurrency", "2", "--repeats", "1", "--new-tokens", "5"]
    assert slotwise(*words, "--json", "--server", served.address).code == 0
    sent = [r for r in served.script.requests if r.DESCRIPTOR.name == "GenerateRequest"]
    # Two rounds of warm-up (1 and 2 requests), then all tokens, then the first ones.
    assert [r.max_new_tokens for r in sent] == [2, 2, 2, 5, 5, 1, 1]
    prompts = [sorted(tuple(r.token_ids.ids) for r in pair) for pair in (sent[3:5], sent[5:])]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 2


def test_the_limit_of_memory_stands_beside():
    model = SimpleNamespace(name="m")
    worker = SimpleNamespace(device="cuda:0", weight_dtype="bfloat16", kv_dtype="bfloat16")
    worker.num_threads = 1
    server = SimpleNamespace(workers=(worker,))
    runs = [Run((Timeline(0.0, ((1.0, 1), (2.0, 7))),), 0.1)]
    served = bench.Served(model, server, (Level.of(2, runs),))
    limit = SimpleNamespace(step_ms=lambda tokens: tokens / 100, bytes_per_s=4e12)
    result = bench._summary(served, bench.Plan(Work(96, 8), (2,), 1), limit)
    # 2 x (96 + 4) tokens: 2 ms for 2 tokens.
    assert result["levels"][0]["limit_tokens_per_s"] == pytest.approx(1000)
    assert result["memory_bytes_per_s"] == 4e12
    assert result["levels"][0]["difference_ratio_to_one"] is None


def test_the_limit_is_of_the_weights_and_the_bandwidth(monkeypatch, tmp_path):
    config = model_config("qwen3-8b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def rates(command):
        asked.append(command[2:])
        return {"copy_bytes_per_s": 4.19e12}

    monkeypatch.setattr(limits, "run_json", rates)
    worker = SimpleNamespace(device="cuda:0", weight_dtype="bfloat16", kv_dtype="bfloat16")
    server = SimpleNamespace(workers=(worker,))
    limit = limits.find_limit(tmp_path, server, None, report_nothing)
    assert asked == [["worker", "bench-kernels", "--roofs-only"]]
    # As peers/README.md has it: 277 tok/s.
    assert 1e3 / limit.step_ms(0) == pytest.approx(277, rel=0.003)
    two = limits.find_limit(
        tmp_path, SimpleNamespace(workers=(worker,) * 2), 4190.0, report_nothing
    )
    assert two.step_ms(0) == pytest.approx(limit.step_ms(0) / 2)
    assert len(asked) == 1
    worker.device = "cpu"
    assert limits.find_limit(tmp_path, server, None, report_nothing) is None


def test_an_engine_on_a_gpu_is_measured_there(monkeypatch, tmp_path):
    asked = []

    def run(command):
        asked.append(command)
        return {"ladder": [{"concurrency": 1, "wall_ms": 5.0}, {"concurrency": 1, "wall_ms": 7.0}]}

    monkeypatch.setattr(bench, "run_json", run)
    worker = SimpleNamespace(device="cuda:0", weight_dtype="bfloat16", kv_dtype="bfloat16")
    worker.num_threads = 1
    model = SimpleNamespace(vocab_size=9, end_token_ids=(), bos_token_id=None)
    served = bench.Served(model, SimpleNamespace(workers=(worker,)), ())
    plan = bench.Plan(Work(4, 8), (1,), 2)
    assert bench._run_engine(tmp_path, served, plan, report_nothing) == {1: [5.0, 7.0]}
    assert asked[0][asked[0].index("--device") + 1] == "cuda"
    worker.device = "cpu"
    bench._run_engine(tmp_path, served, plan, report_nothing)
    assert asked[1][asked[1].index("--device") + 1] == "cpu"


def test_the_idle_time_that_a_worker_tells(caplog):
    runner = SimpleNamespace(gaps_ns=lambda count: [4000] * 90 + [70_000] * 10)
    with caplog.at_level("INFO"):
        rank._log_idle(runner)
    (words,) = caplog.messages
    begin = "2026-01-01T00:00:00.000Z INFO slotwise.worker: worker %d: worker.rank: %s"
    other = words.replace("4.0", "9.0")
    result = {}
    bench._add_idle(result, [begin % (1, other), begin % (0, words)])
    assert result == {"idle_between_steps_us": {"median": 4.0, "percentile_99": 70.0}}


def test_a_ladder_has_the_common_form_and_a_report(slotwise, served, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["bench", "ladder", "--concurrency", "1,2", "--repeats", "2", "--new-tokens", "5"]
    files = ["--json-file", str(tmp_path / "a.json"), "--report", str(tmp_path / "a.html")]
    done = slotwise(*words, *files, "--server", served.address)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["kind"], result["complete"]) == ("ladder", True)
    assert len(result["figures"]["n=2 tokens/s"]["rounds"]) == 2
    assert "n=2 tokens/s" in (tmp_path / "a.html").read_text()
    done = slotwise("bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"))
    assert done.code == 0
    assert "same within spread" in done.out
