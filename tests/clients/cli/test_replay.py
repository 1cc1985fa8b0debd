from __future__ import annotations

import json
from collections import deque

import pytest
from clients.lossy_server import NOT_FOUND, Fault, refusal
from google.rpc import code_pb2

DIFFERS = refusal(
    code_pb2.FAILED_PRECONDITION, "SETUP_DIFFERS", "device_name is 'cpu' and was 'NVIDIA H200'"
)


def test_an_equal_run(slotwise, lossy):
    done = slotwise("replay", "old", "--server", lossy.address)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "request old, accepted 2023-11-14 22:13:20 UTC"
    assert "device_name cpu" in lines[1]
    assert lines[2] == f"seed {2**63 + 5}, 2 prompt tokens"
    assert json.loads(lines[3].removeprefix("parameters: "))["max_new_tokens"] == 6
    assert lines[-1] == "equal: 6 tokens"
    told = json.loads(slotwise("replay", "old", "--json", "--server", lossy.address).out)
    assert (told["num_tokens"], told["difference"]) == (6, None)
    assert told["record"]["answers"][0]["token_ids"] == [100, 101, 102, 103, 104, 105]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shift": 50}, "answer 0, token 2 was 102 and now is 152"),
        ({"recorded": 4}, "answer 0, token 4 was none and now is 104"),
        ({"end": 2}, "answer 0 ended by length, now by stop"),
    ],
)
def test_a_difference_is_told_and_is_a_failure(slotwise, lossy, change, words):
    lossy.script.replayed = change
    done = slotwise("replay", "old", "--server", lossy.address)
    assert done.code == 1
    assert done.out.splitlines()[-1] == f"differs: {words}"
    told = json.loads(slotwise("replay", "old", "--json", "--server", lossy.address).out)
    assert told["difference"] == words


def test_what_was_cancelled_is_compared_as_far_as_it_came(slotwise, lossy):
    lossy.script.replayed = {"recorded": 3, "end": 3}
    done = slotwise("replay", "old", "--server", lossy.address)
    assert (done.code, done.out.splitlines()[-1]) == (0, "equal: 3 tokens")
    lossy.script.replayed = {"recorded": 3, "end": 3, "shift": 9}
    done = slotwise("replay", "old", "--server", lossy.address)
    assert done.out.splitlines()[-1] == "differs: answer 0, token 2 was 102 and now is 111"


@pytest.mark.parametrize("status", [DIFFERS, NOT_FOUND])
def test_a_refusal_has_its_own_exit_status(slotwise, lossy, status):
    lossy.script.error = status
    done = slotwise("replay", "old", "--server", lossy.address)
    assert (done.code, done.out) == (4, "")
    assert done.err == f"error: {status.message}\n"


def test_attach_reads_on(slotwise, lossy):
    words = ["--server", lossy.address]
    slotwise("generate", "x", "-n", "2", "--request-id", "mine", *words)
    done = slotwise("attach", "mine", "--from", "4", "--from", "5", *words)
    assert (done.code, done.out) == (0, "--- answer 0\n 104 105!\n--- answer 1\n 205!\n")
    done = slotwise("attach", "mine", *words)
    assert done.code == 2
    assert "say how many with -n" in done.err
    slotwise("generate", "x", "--request-id", "one", *words)
    done = slotwise("attach", "one", "--json", *words)
    assert json.loads(done.out)["token_ids"] == [100, 101, 102, 103, 104, 105]
    done = slotwise("attach", "nobody", *words)
    assert (done.code, done.err) == (4, f"error: {NOT_FOUND.message}\n")


def test_a_lost_connection_is_not_seen(slotwise, lossy):
    words = ["generate", "x", "-v", "--request-id", "mine", "--server", lossy.address]
    lossy.script.faults = deque([Fault(4, refusal(code_pb2.UNAVAILABLE, "UNAVAILABLE", "drains"))])
    done = slotwise(*words)
    assert (done.code, done.out) == (0, " 100 102 103 104 105!\n")
    assert done.err == "request mine\n"
    assert lossy.script.calls == ["Generate", "Attach 3"]
