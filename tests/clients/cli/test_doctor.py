from __future__ import annotations

import json

import pytest

from checkpoints import make_checkpoint
from slotwise_cli import doctor as doctor_module
from slotwise_client import Worker


def findings(done) -> dict[str, dict]:
    return {finding["what"]: finding for finding in json.loads(done.out)["findings"]}


def test_this_machine_has_what_is_needed(slotwise):
    done = slotwise("doctor", "--json", "--server", "127.0.0.1:1")
    found = findings(done)
    assert done.code == 0, done.out
    for what in ("Python", "torch", "grpcio", "native library", "cores", "memory", "cache folder"):
        assert found[what]["ok"], found[what]
    assert found["server"]["state"] == "none on 127.0.0.1:1"


def test_a_missing_package_is_a_fault_and_says_how_to_get_it(slotwise, monkeypatch):
    monkeypatch.setattr(doctor_module, "PACKAGES", ("no-such-package-here",))
    done = slotwise("doctor", "--json", "--server", "127.0.0.1:1")
    assert done.code == 1
    assert "pip install no-such-package-here" in findings(done)["no-such-package-here"]["advice"]


def test_an_empty_cache_is_a_remark(slotwise, monkeypatch, tmp_path):
    monkeypatch.setenv("SLOTWISE_CACHE", str(tmp_path / "cache"))
    done = slotwise("doctor", "--json", "--server", "127.0.0.1:1")
    found = findings(done)
    assert found["demo model"]["ok"] is None
    assert str(tmp_path) in found["cache folder"]["state"]
    assert not (tmp_path / "cache").exists(), "looking must not write"


def test_a_running_server_is_compared_with_its_plan(slotwise, served):
    found = findings(slotwise("doctor", "--json", "--server", served.address))
    assert found["worker 0 memory"]["ok"]
    assert "+1.0%" in found["worker 0 memory"]["state"]
    assert found["worker 0 self-test rows"]["ok"]


@pytest.mark.parametrize(
    ("device", "measured", "good"),
    [
        ("cpu", 970, True),
        ("cpu", 960, False),
        ("cpu", 1040, False),
        ("cuda:0 (NVIDIA H200)", 600, True),
        ("cuda:0 (NVIDIA H200)", 1030, True),
        ("cuda:0 (NVIDIA H200)", 1040, False),
    ],
)
def test_memory_that_was_measured_is_compared(device, measured, good):
    worker = Worker(0, "", device, "bfloat16", "bfloat16", 1000, measured, (), 1)
    finding = doctor_module._memory(worker)
    assert finding.ok is good
    assert bool(finding.advice) is not good


@pytest.mark.parametrize("fits", [True, False])
def test_a_plan_says_what_fits(fits):
    limits = {"num_slots": 8, "max_seq_len": 4096, "weight_dtype": "float32"}
    part = {
        "limits": limits,
        "weight_bytes": 2**30,
        "kv_bytes": 2**31,
        "workspace_bytes": 0,
        "needed_bytes": 3 * 2**30,
        "available_bytes": 2**32,
        "fits": fits,
        "largest_fitting": [[3, 4096], [8, 1408]],
    }
    (finding,) = doctor_module._plan_findings({"ranks": [part]})
    assert finding.ok is fits
    assert "8 slots x 4096" in finding.state
    assert "weights 1.00 GiB + KV 2.00 GiB" in finding.state
    assert finding.advice == ("" if fits else "fits: 3 slots x 4096, or 8 slots x 1408")


def test_a_folder_that_is_not_there_is_named(slotwise):
    done = slotwise("doctor", "/no/such/model")
    assert done.code == 1
    assert "/no/such/model" in done.err


def test_a_model_that_cannot_be_planned_is_a_fault_beside_the_others(slotwise, tmp_path):
    done = slotwise("doctor", str(tmp_path), "--json", "--server", "127.0.0.1:1")
    assert done.code == 1
    found = findings(done)
    assert "config.json" in found["plan"]["state"]
    assert found["Python"]["ok"]


def test_many_slots_are_planned(slotwise, tmp_path):
    make_checkpoint(tmp_path / "tiny", "llama")
    done = slotwise("doctor", str(tmp_path / "tiny"), "--json", "--num-slots", "300")
    assert "300 slots x" in findings(done)["plan, rank 0"]["state"]


def test_an_address_without_a_port_is_wrong_usage(slotwise):
    assert slotwise("doctor", "--server", "localhost").code == 2


def test_people_get_a_line_per_finding(slotwise, served):
    done = slotwise("doctor", "--server", served.address)
    assert "worker 0 memory: predicted" in done.out
