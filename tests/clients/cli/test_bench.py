from __future__ import annotations

import json
import sys

import pytest

from slotwise_cli import bench
from slotwise_cli.output import CliError


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
