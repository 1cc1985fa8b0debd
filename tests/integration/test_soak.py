"""A thousand mixed requests on a real server: nothing leaks, nothing is lost (B42, memory)."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from chaos.probes import until_idle
from checkpoints import make_checkpoint
from integration.servers import ANSWER_TIMEOUT_S, Server, running_server
from slotwise.v1 import inference_pb2 as pb

NUM_SLOTS = 4
MAX_SEQ_LEN = 256
# The promise is 3 %; the rest of a process this small is the allocator's rounding.
MEMORY_GROWTH = 1.03


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "llama", tokenizer=True)
    flags = ("--num-slots", str(NUM_SLOTS), "--max-seq-len", str(MAX_SEQ_LEN))
    with running_server(folder, *flags) as running:
        yield running


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in fields if line.startswith("VmRSS"))


def mixed_request(rng: random.Random) -> pb.GenerateRequest:
    length = rng.choice([1, 5, 30, 100, 200])
    # Half of the prompts begin alike, and find each other's prefixes.
    ids = [rng.randrange(3, 300) for _ in range(length)]
    common = rng.choice([0, 0, 20, 90])
    ids[:common] = [3 + place * place % 290 for place in range(min(common, length))]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.SamplingParams(
            temperature=rng.choice([0, 0.5, 1.0]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([0.5, 1.0]),
            seed=rng.randrange(1 << 64),
        ),
        max_new_tokens=rng.randrange(1, 40),
        ignore_eos=rng.random() < 0.5,
        stop=rng.choice([[], ["e"]]),
        cache_salt=rng.choice(["", "", "s"]),
    )
    add_features(request, rng)
    return request


def add_features(request: pb.GenerateRequest, rng: random.Random) -> None:
    """Now and then one of those that have state of their own."""
    match rng.randrange(8):
        case 0:
            request.sampling.frequency_penalty = 0.5
            request.sampling.repetition_penalty = 1.1
            request.sampling.logit_bias[7] = 2.0
        case 1:
            request.logprobs = rng.randrange(21)
            request.prompt_logprobs = rng.randrange(21)
        case 2:
            request.n = rng.randrange(1, 4)
        case 3:
            request.regex = "[a-z]{3,20}"


def one(server: Server, seed: int) -> str:
    """Runs one request of the mix; how it ended."""
    rng = random.Random(seed)
    request = mixed_request(rng)
    kind = rng.random()
    if kind < 0.02:
        request.token_ids.ids.append(1 << 20)
    num_open = request.n or 1
    call = server.stub.Generate(request, timeout=0.05 if 0.02 <= kind < 0.07 else ANSWER_TIMEOUT_S)
    try:
        for count, response in enumerate(call):
            if kind > 0.7 and count >= 2:
                call.cancel()
            if response.HasField("finished"):
                num_open -= 1
            if not num_open:
                return pb.FinishReason.Name(response.finished.finish_reason)
    except grpc.RpcError as error:
        return error.code().name
    raise AssertionError("a stream ended without Finished or a status")


def run_mix(server: Server, seeds: range) -> Counter[str]:
    with ThreadPoolExecutor(12) as pool:
        return Counter(pool.map(lambda seed: one(server, seed), seeds))


def test_a_thousand_mixed_requests(server):
    worker = server.worker_pids()[0]
    outcomes = run_mix(server, range(50))
    after_50 = resident_bytes(worker)
    scheduler_after_50 = resident_bytes(server.process.pid)
    outcomes += run_mix(server, range(50, 1000))
    assert sum(outcomes.values()) == 1000
    assert set(outcomes) <= {
        "FINISH_REASON_STOP",
        "FINISH_REASON_LENGTH",
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "INVALID_ARGUMENT",
    }, outcomes
    assert min(outcomes["FINISH_REASON_LENGTH"], outcomes["CANCELLED"]) > 50
    assert outcomes["INVALID_ARGUMENT"] > 5
    assert resident_bytes(worker) < after_50 * MEMORY_GROWTH
    # The scheduler's own heap settles a little later than the worker's: no unbounded growth.
    assert resident_bytes(server.process.pid) < scheduler_after_50 * 1.2

    # The server learns of the last cancels a little later than their clients.
    load = until_idle(server.stub)
    assert load.num_used_tokens == 0
    ended = load.requests
    assert ended.accepted == (
        ended.stop + ended.length + ended.cancelled + ended.deadline + ended.error
    )
    assert ended.rejected_invalid == outcomes["INVALID_ARGUMENT"]
    assert ended.error == 0
    assert load.prefix_cache.num_hits > 100
    assert load.prefix_cache.num_copies > 0
    slots = server.stub.ListSlots(pb.ListSlotsRequest()).slots
    assert [slot.state for slot in slots] == [pb.SLOT_STATE_FREE] * NUM_SLOTS


def test_the_answer_is_the_same_after_all_that(server):
    """The slots have been used by many; no state of theirs is left."""
    request = mixed_request(random.Random(7))
    first = server.collect(request).token_ids
    run_mix(server, range(2000, 2100))
    again = [server.collect(request).token_ids for _ in range(NUM_SLOTS)]
    assert again == [first] * NUM_SLOTS
