from __future__ import annotations

import time

import pytest
from clients.scripted_server import WORDS

from slotwise.v1 import inference_pb2 as pb
from slotwise_cli.latency import Timeline, percentile
from slotwise_cli.measure import Level, Run, Spread, Work, run_once
from slotwise_client import AsyncClient, ModelInfo
from slotwise_client._protocol import mirror


def timeline(sent: float, *arrivals: tuple[float, int]) -> Timeline:
    return Timeline(sent, arrivals)


def test_time_to_first_token_counts_from_sending():
    assert timeline(10.0, (10.5, 1), (11.0, 1)).ttft_ms == pytest.approx(500)


def test_tokens_of_one_message_share_the_wait_before_it():
    gaps = timeline(0.0, (1.0, 1), (1.4, 4), (1.5, 1)).itl_ms
    assert gaps == pytest.approx([100, 100, 100, 100, 100])
    assert len(gaps) == timeline(0.0, (1.0, 1), (1.4, 4), (1.5, 1)).num_tokens - 1


def test_a_run_spans_from_the_first_sent_to_the_last_token():
    run = Run((timeline(1.0, (2.0, 1), (4.0, 3)), timeline(2.0, (3.0, 2), (6.0, 2))), 0.25)
    assert run.wall_s == 5.0
    assert run.tokens_per_s == pytest.approx(8 / 5)


def test_decode_alone_counts_from_the_last_first_token():
    early = timeline(0.0, (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1))
    late = timeline(0.0, (3.0, 1), (4.0, 2), (5.0, 2))
    # After 3.0: two tokens of the early one, four of the late one, in 2 s.
    assert Run((early, late), 0.5).decode_tokens_per_s == pytest.approx(3.0)


def test_percentiles_are_values_that_occurred():
    values = list(range(100, 0, -1))
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([3.0], 99) == 3.0


def test_a_level_sums_up_its_rounds():
    slow = Run((timeline(0.0, (2.0, 1), (4.0, 1)),), 0.5)
    fast = Run((timeline(0.0, (1.0, 1), (2.0, 1)),), 0.3)
    level = Level.of(1, [slow, fast, fast])
    assert level.tokens_per_s == Spread(1.0, 0.5, 1.0)
    assert level.tokens_per_s.percent == pytest.approx(50)
    assert level.wall_ms.median == 2000
    assert (level.ttft_ms_p50, level.ttft_ms_max) == (1000, 2000)
    assert (level.itl_ms_p50, level.itl_ms_p99) == (1000, 2000)
    assert level.prefill_share == 0.3


def test_the_rate_by_difference_leaves_the_first_tokens_out():
    run = Run((timeline(0.0, (1.0, 1), (6.0, 4)), timeline(0.0, (2.0, 1), (7.0, 4))), 0.5)
    first = Run((timeline(5.0, (6.0, 1)), timeline(5.0, (7.0, 1))), 1.0)
    # 2 x 4 tokens in 7 - 2 s.
    level = Level.of(2, [run], [first])
    assert level.difference_tokens_per_s == Spread(1.6, 1.6, 1.6)
    assert level.first_token_wall_ms == Spread(2000, 2000, 2000)
    assert Level.of(2, [run]).difference_tokens_per_s is None
    assert Level.of(2, [run], [run]).difference_tokens_per_s is None


def test_the_rate_by_difference_is_of_the_median_times():
    runs = [Run((timeline(0.0, (1.0, 1), (wall, 12)),), 0.5) for wall in (14.0, 7.0, 8.0)]
    firsts = [Run((timeline(0.0, (wall, 1)),), 1.0) for wall in (2.0, 1.0, 6.0)]
    # 12 tokens in 8 - 2 s; in the single rounds in 12, 6 and 2 s.
    assert Level.of(1, runs, firsts).difference_tokens_per_s == Spread(2.0, 1.0, 6.0)


def test_prompts_are_of_the_length_distinct_and_repeatable():
    info = pb.GetModelInfoResponse(vocab_size=50, end_token_ids=[2, 7], bos_token_id=1)
    model = mirror(ModelInfo, info)
    work = Work(prompt_tokens=40, new_tokens=2)
    prompts = work.prompts(model, 8, seed=3)
    assert prompts == work.prompts(model, 8, seed=3)
    assert prompts != work.prompts(model, 8, seed=4)
    assert len({tuple(prompt) for prompt in prompts}) == 8
    assert all(len(prompt) == 40 for prompt in prompts)
    used = {token_id for prompt in prompts for token_id in prompt}
    assert used <= set(range(50)) - {1, 2, 7}


class Noting(AsyncClient):
    """Notes when each request was built."""

    def __init__(self, address):
        super().__init__(address)
        self.built = []

    def generate(self, *args, **options):
        stream = super().generate(*args, **options)
        self.built.append(time.perf_counter())
        return stream


async def test_no_clock_starts_before_all_requests_are_built(served):
    async with Noting(served.address) as client:
        run = await run_once(client, [[3, 4], [5, 6]], new_tokens=5)
        assert len(client.built) == 2
        assert min(timeline.sent for timeline in run.timelines) >= max(client.built)


async def test_a_round_asks_for_fixed_work_of_each_prompt(served):
    async with AsyncClient(served.address) as client:
        run = await run_once(client, [[3, 4], [5, 6]], new_tokens=5)
    assert [timeline.num_tokens for timeline in run.timelines] == [len(WORDS)] * 2
    # Nothing of a round before is found: the same prompts may come again.
    assert served.script.requests[0].DESCRIPTOR.name == "FlushCacheRequest"
    sent = [r for r in served.script.requests if r.DESCRIPTOR.name == "GenerateRequest"]
    assert sorted(list(request.token_ids.ids) for request in sent) == [[3, 4], [5, 6]]
    assert all(request.ignore_eos and request.max_new_tokens == 5 for request in sent)
    assert all(request.sampling.HasField("temperature") for request in sent)
