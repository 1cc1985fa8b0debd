"""The simulator beside what is known otherwise: a queue's closed form, and the real scheduler."""

from __future__ import annotations

import dataclasses
import math
from collections import deque

import pytest
from scheduler_driver import make_limits, make_request

from fakes import FakeWorker
from scheduler_service.request import FinishedEvent, TokenEvent
from scheduler_service.scheduler import Scheduler
from scheduler_service.step import PrefillChunk, StepCommand
from slotwise_cli.service_times import ServiceTimes
from slotwise_cli.simulated_replica import Job, Replica
from slotwise_cli.simulation import Fleet, Objective, Simulation, Workload

# Nothing but decoding takes time, and that as long for any number of rows.
PLAIN = ServiceTimes("plain", ((1, 0.01),), 0, 0.0, 0.0, 0.0, 0.0)
# Prompts too; a step of all rows is slower than that of one.
ROUND = ServiceTimes("round", ((1, 0.010), (4, 0.016)), 0, 0.0, 0.0005, 0.0, 0.0, mixed_tokens=32)


def erlang_c(servers: int, load: float) -> float:
    """Share of those who wait in M/M/c, by the recursion of Erlang B."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def test_the_closed_form_is_right():
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    # Two servers, each half busy: rho^2 * 2 / (1 + rho) of rho = 0.5.
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("servers", "use"), [(1, 0.7), (8, 0.8), (32, 0.9)])
def test_one_replica_waits_as_a_queue_of_many_servers(servers, use):
    """Poisson arrivals, exponential answers of 200 steps: M/M/c with c the slots."""
    service_s = 200 * 0.01
    workload = Workload(
        rate=use * servers / service_s,
        duration_s=40_000 / (use * servers / service_s),
        warm_up_s=100 * service_s,
        output_tokens=200,
    )
    fleet = Fleet(PLAIN, 1, servers, servers, max_queue_len=10**6)
    jobs = Simulation(fleet, workload).run()
    assert len(jobs) == pytest.approx(40_000, rel=0.02)
    waits = [job.time_to_first_token_s for job in jobs]
    share = sum(wait > 1e-6 for wait in waits) / len(waits)
    expected = erlang_c(servers, use * servers)
    # Some 40,000 waits that hang together: a few percent.
    assert share == pytest.approx(expected, rel=0.05)
    mean = expected * service_s / (servers * (1 - use))
    assert sum(waits) / len(waits) == pytest.approx(mean, rel=0.15)


def test_few_slots_and_no_queue_refuse_what_erlang_b_says():
    """One slot, no room to wait, always as much work as it can do: half are refused."""
    workload = Workload(rate=0.5, duration_s=20_000, warm_up_s=100, output_tokens=200)
    jobs = Simulation(Fleet(PLAIN, 1, 1, 1, max_queue_len=0), workload).run()
    assert sum(job.is_refused for job in jobs) / len(jobs) == pytest.approx(0.5, rel=0.05)


def scheduled(times: ServiceTimes, jobs: list[Job], num_slots: int) -> dict[int, tuple]:
    """First token's and last token's second of each job under the real scheduler, with a worker
    that takes as long for a command as `times` says."""
    limits = make_limits(
        num_slots=num_slots,
        max_seq_len=4096,
        max_step_tokens=10_000,
        max_mixed_step_tokens=times.mixed_tokens,
        run_ahead_window_ns=20_000_000,
    )
    scheduler = Scheduler(limits)
    worker = FakeWorker(num_slots, 4096, 10_000, max_running=num_slots)
    arrivals = deque(sorted(jobs, key=lambda job: job.arrived))
    sent: deque[tuple[float, StepCommand]] = deque()
    now = free_at = 0.0
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while arrivals or sent or not scheduler.is_empty:
        while arrivals and arrivals[0].arrived <= now:
            job = arrivals.popleft()
            prompt = tuple((job.key * 31 + at) % 997 for at in range(job.prompt_tokens))
            scheduler.submit([make_request(str(job.key), prompt, job.output_tokens)])
        while (command := scheduler.plan_step(round(now * 1e9))) is not None:
            free_at = max(now, free_at) + duration_s(times, command)
            sent.append((free_at, command))
        now = min(time for time in (*(j.arrived for j in arrivals), *(t for t, _ in sent)))
        if sent and sent[0][0] == now:
            _, command = sent.popleft()
            took_ns = round(duration_s(times, command) * 1e9)
            result = dataclasses.replace(worker.run(command), duration_ns=took_ns)
            for event in scheduler.apply_result(result, round(now * 1e9)):
                if isinstance(event, TokenEvent):
                    first.setdefault(int(event.request_id), now)
                elif isinstance(event, FinishedEvent):
                    last[int(event.request_id)] = now
    return {key: (first[key], last[key]) for key in first}


def duration_s(times: ServiceTimes, command: StepCommand) -> float:
    chunks = [row for row in command.rows if isinstance(row, PrefillChunk)]
    num_decoding = len(command.rows) - len(chunks)
    prompt_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    return (
        command.num_steps * times.step_s(num_decoding, 0.0) + times.prompt_token_s * prompt_tokens
    )


def simulated(times: ServiceTimes, jobs: list[Job], num_slots: int) -> dict[int, tuple]:
    fleet = Fleet(times, 1, num_slots, num_slots)
    simulation = Simulation(fleet, Workload(rate=0.0, duration_s=1e9, warm_up_s=0.0))
    for job in jobs:
        simulation.submit_at(dataclasses.replace(job))
    simulation.run()
    return {job.key: (job.first_token, job.ended) for job in simulation.jobs}


def some_jobs(every_s: float) -> list[Job]:
    """Sixty, of 40 to 239 prompt and 20 to 119 new tokens."""
    return [
        Job(key, 40 + key * 37 % 200, 20 + key * 53 % 100, arrived=key * every_s)
        for key in range(60)
    ]


@pytest.mark.parametrize("every_s", [0.2, 0.6, 1.5])
def test_a_replica_is_as_fast_as_the_scheduler(every_s):
    """Overloaded, busy and idle: means within 3 %, each request within a few commands."""
    jobs = some_jobs(every_s)
    real, ours = scheduled(ROUND, jobs, 4), simulated(ROUND, jobs, 4)
    assert real.keys() == ours.keys()
    for at in (0, 1):
        spent = [real[job.key][at] - job.arrived for job in jobs]
        told = [ours[job.key][at] - job.arrived for job in jobs]
        # Commands of 20 ms, two under way: what comes may wait for both.
        assert sum(told) == pytest.approx(sum(spent), rel=0.03, abs=60 * 0.04)
        assert max(abs(a - b) for a, b in zip(spent, told, strict=True)) < 0.05 * max(spent) + 0.1


def test_a_turn_finds_what_the_turn_before_has_left():
    """Alone: all but the new tokens and the last answer's last one, which no cache holds."""
    workload = Workload(
        rate=0.001, duration_s=1000, warm_up_s=0, turns=4, pause_s=1, is_varied=False
    )
    jobs = Simulation(Fleet(ROUND, 1, 8, 8), workload, seed=3).run()
    assert [job.prompt_tokens for job in jobs[:4]] == [512, 704, 896, 1088]
    assert [job.cached_tokens for job in jobs[:4]] == [0, 639, 831, 1023]


def test_what_all_begin_with_is_computed_once_in_each_life():
    replica = Replica(PLAIN, 1, 2, 10)
    for key, is_after_loss, known in ((1, False, 0), (2, False, 8), (3, True, 0), (4, False, 8)):
        if is_after_loss:
            replica.fail()
            replica.recover()
        now = replica._now + 1
        replica.advance(now)
        job = Job(key, 20, 1, now, system_tokens=8)
        replica.submit(job)
        replica.advance(replica.next_event())
        assert job.cached_tokens == known, key


def test_a_system_prompt_is_part_of_each_turn():
    workload = Workload(
        rate=0.001, duration_s=1000, warm_up_s=0, turns=2, system_tokens=100, is_varied=False
    )
    jobs = Simulation(Fleet(ROUND, 1, 8, 8), workload, seed=3).run()
    assert [job.prompt_tokens for job in jobs[:2]] == [612, 804]


def test_slots_forget_the_longest_unused():
    replica = Replica(PLAIN, 1, 2, 10)
    for key, known in ((1, 0), (2, 0), (3, 0), (1, 0), (3, 10)):
        now = replica._now + 1
        replica.advance(now)
        job = Job(key, 11, 1, now)
        replica.submit(job)
        replica.advance(replica.next_event())
        assert job.cached_tokens == known, key


def test_a_lost_group_delays_and_loses_nothing():
    fleet = Fleet(ROUND, 1, 4, 4)
    simulation = Simulation(fleet, Workload(rate=0.0, duration_s=1e9, warm_up_s=0.0))
    job = Job(1, 100, 100, arrived=0.0)
    simulation.submit_at(job)
    simulation.fail_at(0, 0.55)
    simulation.run()
    # 0.05 s of prompt, then 50 tokens until the loss; 10 s later prompt and 51 tokens anew.
    assert job.first_token == pytest.approx(0.05)
    assert job.ended == pytest.approx(0.55 + 10 + 151 * 0.0005 + 48 * 0.01, abs=0.011)


@pytest.mark.parametrize("routing", ["hash", "least", "random"])
def test_a_replica_that_is_down_gets_nothing(routing):
    fleet = Fleet(PLAIN, 3, 4, 4, routing=routing, mtbf_s=30, recovery_s=5)
    workload = Workload(rate=5, duration_s=300, warm_up_s=0, output_tokens=20)
    simulation = Simulation(fleet, workload)
    jobs = simulation.run()
    assert simulation.num_failures > 10
    ended = [job for job in jobs if not job.is_refused]
    # All three down at once is rare, and the only reason to refuse.
    assert len(ended) > 0.97 * len(jobs)
    assert all(not math.isnan(job.ended) for job in ended)


def test_affinity_pays():
    """The reason for routing by key: two thirds of the prompts are found, else hardly any."""
    workload = Workload(rate=40, duration_s=30, warm_up_s=30, turns=6, pause_s=3)
    rates = {
        routing: Simulation(Fleet(ServiceTimes(), 8, 8, 64, routing=routing), workload)
        .outcome(Objective())
        .hit_rate
        for routing in ("hash", "least", "random")
    }
    assert rates["hash"] > 0.6
    assert rates["least"] < 0.3
    assert rates["random"] < 0.3


def test_the_same_conversations_for_every_fleet():
    workload = Workload(rate=2, duration_s=20, warm_up_s=0)
    asked = [
        [(j.arrived, j.prompt_tokens, j.output_tokens) for j in Simulation(fleet, workload).run()]
        for fleet in (Fleet(PLAIN, 1, 64, 64), Fleet(ROUND, 3, 64, 64, routing="random"))
    ]
    assert asked[0] == asked[1]
    assert asked[0] != [
        (j.arrived, j.prompt_tokens, j.output_tokens)
        for j in Simulation(Fleet(PLAIN, 1, 64, 64), workload, seed=2).run()
    ]


def test_an_outcome_of_nothing():
    outcome = Simulation(Fleet(PLAIN), Workload(rate=1e-9, duration_s=1, warm_up_s=0)).outcome(
        Objective()
    )
    assert outcome.num_requests == 0
    assert outcome.as_dict()["goodput"] is None
