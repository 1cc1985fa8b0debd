"""A fleet of replicas behind a load balancer, run event by event on a clock of its own."""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .routing import HashRouter, LeastRouter, RandomRouter, Router
from .service_times import ServiceTimes
from .simulated_replica import Job, Replica

ROUTINGS = ("hash", "least", "random")


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations that begin at random times; a turn follows the answer before it and a pause."""

    # Requests a second, of all conversations together, in the long run.
    rate: float
    duration_s: float
    # Before what is counted.
    warm_up_s: float
    turns: int = 1
    # Of the first turn, of what each further one adds, and of an answer.
    prompt_tokens: int = 512
    turn_tokens: int = 64
    output_tokens: int = 128
    # More, before the first turn of each conversation: the same ones in all of them.
    system_tokens: int = 0
    # Mean pause between an answer and the next turn, exponential.
    pause_s: float = 10.0
    # Lengths are drawn from an exponential distribution of their mean; else all are that mean.
    is_varied: bool = True


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal replicas, what stands before them, and how often one loses its workers."""

    times: ServiceTimes
    num_replicas: int = 1
    max_running: int = 8
    num_slots: int = 8
    max_queue_len: int = 256
    # Of ROUTINGS.
    routing: str = "hash"
    # Of consistent hash: the most requests of a replica, times their mean.
    load_bound: float = 1.25
    # Mean time between failures of a replica; infinite: none.
    mtbf_s: float = math.inf
    recovery_s: float = 10.0

    def router(self, rng: random.Random) -> Router:
        """What it stands behind."""
        if self.routing == "hash":
            return HashRouter(self.num_replicas, self.load_bound)
        return LeastRouter(rng) if self.routing == "least" else RandomRouter(rng)

    def replica(self) -> Replica:
        """One of them, empty."""
        return Replica(self.times, self.max_running, self.num_slots, self.max_queue_len)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to be good; None: whatever it takes."""

    time_to_first_token_s: float | None = None
    time_per_output_token_s: float | None = None

    def is_met(self, job: Job) -> bool:
        """Refused ones never are."""
        if job.is_refused:
            return False
        first, each = self.time_to_first_token_s, self.time_per_output_token_s
        return (first is None or job.time_to_first_token_s <= first) and (
            each is None or job.time_per_output_token_s <= each
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests that arrived after the warm-up. Latencies are of those that were taken, NaN
    where there were none."""

    num_requests: int
    num_refused: int
    # Share of all requests that met the objective.
    goodput: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    # Cached tokens over prompt tokens.
    hit_rate: float
    output_tokens_per_s: float
    # Running requests over the most that may run.
    utilization: float
    num_failures: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


class Simulation:
    """One run. The same seed gives the same conversations whatever the fleet."""

    def __init__(self, fleet: Fleet, workload: Workload, seed: int = 1) -> None:
        self._fleet, self._workload = fleet, workload
        self._seed = seed
        self._starts = random.Random(f"starts {seed}")
        self._faults = random.Random(f"faults {seed}")
        self._router = fleet.router(random.Random(f"routing {seed}"))
        self._replicas = [fleet.replica() for _ in range(fleet.num_replicas)]
        self._loads = [0] * fleet.num_replicas
        self._is_up = [True] * fleet.num_replicas
        # An event that was planned for a replica before its last change is void.
        self._version = [0] * fleet.num_replicas
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._num_keys = 0
        self.num_failures = 0
        self._end_s = workload.warm_up_s + workload.duration_s
        self._conversations: dict[Job, _Conversation] = {}
        # All that arrived so far.
        self.jobs: list[Job] = []

    def run(self) -> list[Job]:
        """All requests that arrived in the time that counts; each is answered or refused."""
        if self._workload.rate > 0:
            self._plan(self._starts.expovariate(self._start_rate), self._begin_conversation)
        if self._fleet.mtbf_s < math.inf:
            for one in range(self._fleet.num_replicas):
                self._plan_failure(one, 0.0)
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        return [job for job in self.jobs if job.arrived >= self._workload.warm_up_s]

    def outcome(self, objective: Objective) -> Outcome:
        """Runs, and sums up."""
        jobs = self.run()
        taken = [job for job in jobs if not job.is_refused]
        firsts = sorted(job.time_to_first_token_s for job in taken)
        each = sorted(job.time_per_output_token_s for job in taken if job.output_tokens > 1)
        prompts = sum(job.prompt_tokens for job in taken)
        last = max((job.ended for job in self.jobs if not job.is_refused), default=0.0)
        busy_s = sum(replica.busy_s for replica in self._replicas)
        seats = self._fleet.num_replicas * self._fleet.max_running
        return Outcome(
            num_requests=len(jobs),
            num_refused=len(jobs) - len(taken),
            goodput=_share(sum(map(objective.is_met, jobs)), len(jobs)),
            ttft_p50_s=_quantile(firsts, 0.5),
            ttft_p99_s=_quantile(firsts, 0.99),
            tpot_p50_s=_quantile(each, 0.5),
            tpot_p99_s=_quantile(each, 0.99),
            hit_rate=_share(sum(job.cached_tokens for job in taken), prompts),
            output_tokens_per_s=sum(j.output_tokens for j in taken) / self._workload.duration_s,
            utilization=_share(busy_s, seats * last),
            num_failures=self.num_failures,
        )

    def submit_at(self, job: Job) -> None:
        """Plans a request of the caller's own, for its time of arrival."""
        self._plan(job.arrived, lambda now: self._submit(job, now))

    def fail_at(self, one: int, at: float) -> None:
        """Plans a loss of a replica's workers."""
        self._plan(at, lambda now: self._fail(one, now))

    def _submit(self, job: Job, now: float) -> None:
        """Sends a request to the replica that the router chooses."""
        self.jobs.append(job)
        one = self._router.choose(job.key, self._loads, self._is_up)
        if one is None:
            job.is_refused = True
            return
        self._advance(one, now)
        self._replicas[one].submit(job)
        self._changed(one)

    @property
    def _start_rate(self) -> float:
        return self._workload.rate / self._workload.turns

    def _begin_conversation(self, now: float) -> None:
        if now >= self._end_s:
            return
        self._num_keys += 1
        drawn = random.Random(f"conversation {self._seed} {self._num_keys}")
        conversation = _Conversation(self._num_keys, self._workload, drawn)
        self._take_turn(conversation, now)
        self._plan(now + self._starts.expovariate(self._start_rate), self._begin_conversation)

    def _take_turn(self, conversation: "_Conversation", now: float) -> None:
        job = conversation.next_job(now)
        self._conversations[job] = conversation
        self._submit(job, now)

    def _go_on(self, job: Job) -> None:
        """The next turn, after a pause; a conversation of which a turn was refused ends there."""
        conversation = self._conversations.pop(job, None)
        if conversation is None or conversation.is_over:
            return
        at = job.ended + conversation.pause_s()
        if at < self._end_s:
            self._plan(at, lambda now: self._take_turn(conversation, now))

    def _advance(self, one: int, now: float) -> None:
        for job in self._replicas[one].advance(now):
            self._go_on(job)

    def _changed(self, one: int) -> None:
        """Plans the replica's next event anew."""
        replica = self._replicas[one]
        self._loads[one] = replica.load
        self._version[one] += 1
        version = self._version[one]

        def wake(now: float) -> None:
            if self._version[one] == version:
                self._advance(one, now)
                self._changed(one)

        at = replica.next_event()
        if at < math.inf:
            self._plan(at, wake)

    def _plan_failure(self, one: int, now: float) -> None:
        at = now + self._faults.expovariate(1 / self._fleet.mtbf_s)
        if at < self._end_s:
            self._plan(at, lambda then: self._fail(one, then))

    def _fail(self, one: int, now: float) -> None:
        self.num_failures += 1
        self._advance(one, now)
        self._replicas[one].fail()
        self._is_up[one] = False
        self._changed(one)
        self._plan(now + self._fleet.recovery_s, lambda then: self._recover(one, then))

    def _recover(self, one: int, now: float) -> None:
        self._advance(one, now)
        self._replicas[one].recover()
        self._is_up[one] = True
        self._changed(one)
        if self._fleet.mtbf_s < math.inf:
            self._plan_failure(one, now)

    def _plan(self, at: float, happen: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, happen))


class _Conversation:
    """What one client asks, turn by turn. Its draws depend on nobody else's."""

    def __init__(self, key: int, workload: Workload, drawn: random.Random) -> None:
        self._key, self._workload, self._drawn = key, workload, drawn
        self._num_turns = 0
        # All that was said so far.
        self._num_tokens = workload.system_tokens

    @property
    def is_over(self) -> bool:
        return self._num_turns == self._workload.turns

    def next_job(self, now: float) -> Job:
        """All that was said, and what the turn adds."""
        is_first = self._num_turns == 0
        more = self._workload.prompt_tokens if is_first else self._workload.turn_tokens
        self._num_turns += 1
        prompt = self._num_tokens + self._length(more)
        answer, shared = self._length(self._workload.output_tokens), self._workload.system_tokens
        job = Job(self._key, prompt, answer, now, shared)
        self._num_tokens = job.prompt_tokens + job.output_tokens
        return job

    def pause_s(self) -> float:
        return self._drawn.expovariate(1 / self._workload.pause_s)

    def _length(self, mean: int) -> int:
        if not self._workload.is_varied:
            return mean
        return max(1, round(self._drawn.expovariate(1 / mean)))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least `share` of them do not pass."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
