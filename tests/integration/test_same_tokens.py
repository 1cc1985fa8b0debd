"""The promise through the whole chain: alone or in company, greedy or drawn, one rank or two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.servers import running_server
from slotwise.v1 import inference_pb2 as pb

PROMPTS = [
    "Once upon a time",
    "The capital of Peru is",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Dear Sir or Madam, I am writing to " * 20,
    "1, 1, 2, 3, 5, 8,",
    "The three laws of robotics are",
    "In the beginning",
]
DRAWS = [
    pb.SamplingParams(temperature=0),
    pb.SamplingParams(temperature=0.8, seed=42),
    pb.SamplingParams(temperature=1.0, top_k=20, seed=7),
    pb.SamplingParams(temperature=1.2, top_p=0.9, seed=2**64 - 1),
    pb.SamplingParams(temperature=0.7, min_p=0.05, top_p=0.95, top_k=50, seed=0),
]


def request(index: int, tokens: int = 24) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=PROMPTS[index],
        sampling=DRAWS[index % len(DRAWS)],
        max_new_tokens=tokens + 3 * index,
        ignore_eos=True,
    )


def together(server, requests):
    with ThreadPoolExecutor(len(requests)) as pool:
        return [got.token_ids for got in pool.map(server.collect, requests)]


@pytest.fixture(scope="module")
def alone(demo_server):
    return [demo_server.collect(request(i)).token_ids for i in range(len(PROMPTS))]


def test_the_answers_differ_from_each_other(alone):
    assert len({tuple(ids[:12]) for ids in alone}) == len(PROMPTS)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_in_company(demo_server, alone, count):
    """B19 (seeds), B20 (greedy): neighbours join and leave, each prompt sits in other slots."""
    order = list(range(len(PROMPTS)))
    for first in range(0, len(order), count):
        group = order[first : first + count][::-1]
        assert together(demo_server, [request(i) for i in group]) == [alone[i] for i in group]


def test_unseeded_draws_differ_and_can_be_repeated(demo_server):
    """B21: no fixed default seed, and the seed in use is told."""
    unseeded = pb.GenerateRequest(
        text=PROMPTS[0], sampling=pb.SamplingParams(temperature=1.0), max_new_tokens=16
    )
    runs = [demo_server.collect(unseeded) for _ in range(4)]
    assert len({tuple(run.token_ids) for run in runs}) == 4
    for run in runs[:2]:
        again = pb.GenerateRequest()
        again.CopyFrom(unseeded)
        again.sampling.seed = run.accepted.seed
        assert demo_server.collect(again).token_ids == run.token_ids


@pytest.mark.parametrize("ranks", [2, 3])
def test_more_ranks_give_the_same_tokens(demo_model, ranks):
    """Float32, greedy: the sums differ in their last bits only, the choices do not."""
    greedy = [
        pb.GenerateRequest(
            text=text, sampling=pb.SamplingParams(temperature=0), max_new_tokens=12, ignore_eos=True
        )
        for text in PROMPTS[:4]
    ]
    flags = ("--max-seq-len", "256", "--num-slots", "4", "--threads", "1")
    with running_server(demo_model, *flags) as one:
        want = together(one, greedy)
    with running_server(demo_model, *flags, "--tp", str(ranks)) as many:
        apart = [many.collect(r).token_ids for r in greedy]
        assert apart == want
        assert together(many, greedy) == want
        assert len(many.worker_pids()) == ranks
