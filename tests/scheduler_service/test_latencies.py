"""Histograms of times and sizes, by hand-computed values."""

from __future__ import annotations

import pytest
from scheduler_driver import STEP_NS, Driver, make_limits, make_request

from scheduler_service.latencies import Histogram, Latencies, bounds
from scheduler_service.request import FinishReason


def filled(histogram: Histogram) -> dict[int, int]:
    """Counts by upper bound; -1: beyond the last."""
    names = [*histogram.upper_bounds, -1]
    return {name: number for name, number in zip(names, histogram.counts, strict=True) if number}


def test_bounds_rise_to_the_last_power():
    assert bounds(10, 2) == (10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)


def test_a_bound_belongs_to_its_bucket():
    histogram = Histogram((10, 20))
    for value in (0, 10, 11, 20, 21, 500):
        histogram.observe(value)
    assert (filled(histogram), histogram.sum) == ({10: 2, 20: 2, -1: 2}, 562)


def test_parts_fall_into_one_bucket_and_keep_the_sum():
    histogram = Histogram((10, 20))
    histogram.observe_parts(35, 3)
    assert (filled(histogram), histogram.sum) == ({20: 3}, 35)


def test_the_first_tokens_and_those_after_it():
    request = make_request("r", arrival_ns=5_000_000)
    latencies = Latencies()
    latencies.note_tokens(request, 0, 2, 25_000_000)
    assert filled(latencies.time_to_first_token) == {20_000_000: 1}
    # The second came with the first.
    assert filled(latencies.inter_token_latency) == {100_000: 1}
    request.last_token_ns = 25_000_000
    latencies.note_tokens(request, 2, 3, 37_000_000)
    assert filled(latencies.inter_token_latency) == {100_000: 1, 5_000_000: 3}
    assert latencies.inter_token_latency.sum == 12_000_000


def test_a_request_from_the_journal_has_no_first_token_here():
    latencies = Latencies()
    latencies.note_tokens(make_request("r"), 7, 1, 1_000)
    assert latencies == Latencies()


def test_requests_through_the_scheduler():
    driver = Driver(make_limits(num_slots=1, max_steps_per_command=1, max_outstanding=1))
    driver.submit(make_request("a", (5, 6, 7), 3))
    driver.submit(make_request("b", (8, 9), 1))
    driver.run()
    counters = driver.scheduler.counters
    latencies, sizes = counters.latencies, counters.sizes
    a, b = (driver.told[name].end for name in "ab")
    assert latencies.time_to_first_token.sum == a.time_to_first_token_ns + b.time_to_first_token_ns
    assert latencies.inter_token_latency.sum == a.decode_ns == 2 * STEP_NS
    assert sum(latencies.inter_token_latency.counts) == 2
    assert latencies.time_per_output_token.sum == STEP_NS
    assert sum(latencies.time_per_output_token.counts) == 1
    assert latencies.request_queue_time.sum == a.queue_ns + b.queue_ns > 0
    assert latencies.request_prefill_time.sum == a.prefill_ns + b.prefill_ns
    in_slots = a.prefill_ns + a.decode_ns + b.prefill_ns
    assert latencies.request_inference_time.sum == in_slots > 0
    parts = (latencies.request_queue_time, latencies.request_prefill_time)
    assert latencies.e2e_request_latency.sum == a.decode_ns + sum(part.sum for part in parts)
    assert (sizes.request_prompt_tokens.sum, sizes.request_generation_tokens.sum) == (5, 4)
    # Two prefill steps of 3 and 2 tokens that sample one each, and two decode steps.
    assert sizes.iteration_tokens.sum == 5 + 4
    assert sum(sizes.iteration_tokens.counts) == counters.num_steps == 4


def test_who_had_no_token_is_in_the_queues_time_alone():
    driver = Driver(make_limits(num_slots=1))
    driver.submit(make_request("a"))
    driver.scheduler.cancel("a", FinishReason.CANCELLED, 5)
    latencies = driver.scheduler.counters.latencies
    assert sum(latencies.request_queue_time.counts) == 1
    assert sum(latencies.e2e_request_latency.counts) == 0


@pytest.mark.parametrize("num_steps", [1, 4])
def test_commands_of_several_steps(num_steps):
    driver = Driver(make_limits(max_steps_per_command=num_steps))
    driver.submit(make_request("a", (5, 6), 9))
    driver.run()
    sizes = driver.scheduler.counters.sizes
    assert sizes.iteration_tokens.sum == 2 + 9
    assert sum(sizes.iteration_tokens.counts) == driver.scheduler.counters.num_steps
