"""One replica of a simulation: who waits, who is prefilled, who decodes, and how fast.

Between two events (an arrival, the end of a prompt, the end of an answer) work flows evenly: all
that decode get tokens at one rate, prompts get the rest of each step. Steps and commands are not
told apart, so an event is off by a step or two.
"""

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from .service_times import ServiceTimes


@dataclass(slots=True, eq=False)
class Job:
    """A request: what it asks, and when it got what. Times are seconds of the simulation."""

    key: int
    # All turns before included.
    prompt_tokens: int
    output_tokens: int
    arrived: float
    # Of the prompt, that all conversations begin with.
    system_tokens: int = 0
    # Of the prompt, found in a slot.
    cached_tokens: int = 0
    first_token: float = math.nan
    ended: float = math.nan
    is_refused: bool = False
    # Of the answer; the first one comes with the prompt's end.
    num_generated: int = 0

    @property
    def time_to_first_token_s(self) -> float:
        return self.first_token - self.arrived

    @property
    def time_per_output_token_s(self) -> float:
        """(E2E - TTFT) / (tokens - 1)."""
        return (self.ended - self.first_token) / max(1, self.output_tokens - 1)


@dataclass(slots=True, eq=False)
class _Prompt:
    """Of a job that is admitted: seconds of work left."""

    job: Job
    left_s: float


class Replica:
    """Fixed slots, first come first served, a history in each slot that is free."""

    def __init__(
        self, times: ServiceTimes, max_running: int, num_slots: int, max_queue_len: int
    ) -> None:
        """As `serve --max-running`, `--num-slots` and `--max-queue-len`."""
        self._times = times
        self._max_running, self._num_slots = max_running, num_slots
        self._max_queue_len = max_queue_len
        self._queue: deque[Job] = deque()
        self._prompts: list[_Prompt] = []
        # By the count of decoded tokens at which each ends.
        self._decoding: list[tuple[float, int, Job]] = []
        # Tokens that a job which decodes all the time would have had.
        self._count = 0.0
        # Sum of context - count over all that decode.
        self._context = 0.0
        # Tokens of free slots by their last tenant's key, the longest unused first.
        self._kept: OrderedDict[int, int] = OrderedDict()
        # Some slot has what all conversations begin with, to copy it from.
        self._has_system = False
        self._now = 0.0
        self._number = 0
        self.is_up = True
        # Requests times seconds, of those that run.
        self.busy_s = 0.0

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return len(self._queue) + self._num_running

    @property
    def _num_running(self) -> int:
        return len(self._prompts) + len(self._decoding)

    def submit(self, job: Job) -> bool:
        """False when the queue is full. The caller has advanced the replica to the arrival."""
        spare = self._max_running - self._num_running
        if len(self._queue) >= self._max_queue_len + max(0, spare):
            job.is_refused = True
            return False
        self._queue.append(job)
        self._admit()
        return True

    def next_event(self) -> float:
        """When a prompt or an answer ends if nobody comes before; infinite: never."""
        if not self.is_up:
            return math.inf
        ends = [self._now + self._prompt_end_s()]
        if self._decoding:
            step_s = self._step_s
            # While prompts are under way, tokens come as the mixed steps do.
            per_token = step_s + (self._times.mixed_s if self._prompts else 0.0)
            ends.append(self._now + max(0.0, self._decoding[0][0] - self._count) * per_token)
        return min(ends)

    def advance(self, now: float) -> list[Job]:
        """Work up to `now`, at most the next event; returns answers that have ended."""
        passed, self._now = now - self._now, now
        self.busy_s += passed * self._num_running
        if not self.is_up:
            return []
        step_s = self._step_s
        if self._prompts:
            cycle_s = step_s + self._times.mixed_s
            share = self._times.mixed_s / cycle_s if step_s else 1.0
            self._work_on_prompts(passed * share)
            self._count += passed / cycle_s if step_s else 0.0
        elif self._decoding:
            self._count += passed / step_s
        self._end_prompts()
        ended = self._end_answers()
        self._admit()
        return ended

    def fail(self) -> None:
        """The workers are lost: caches are empty, those that run begin their prompts again."""
        self.is_up = self._has_system = False
        self._kept.clear()
        lost = [prompt.job for prompt in self._prompts]
        for end, _, job in self._decoding:
            job.num_generated = job.output_tokens - round(end - self._count)
            lost.append(job)
        self._decoding, self._context = [], 0.0
        self._prompts = []
        for job in lost:
            self._begin_prompt(job, cached=0)

    def recover(self) -> None:
        """They are there again."""
        self.is_up = True

    @property
    def _step_s(self) -> float:
        rows = len(self._decoding)
        return self._times.step_s(rows, self._context + rows * self._count)

    def _admit(self) -> None:
        while self._queue and self._num_running < self._max_running:
            job = self._queue.popleft()
            shared = job.system_tokens if self._has_system else 0
            known = max(self._kept.pop(job.key, 0), shared)
            self._has_system = True
            # The last token of a prompt is always computed: its logits are wanted.
            job.cached_tokens = max(0, min(known, job.prompt_tokens - 1))
            self._begin_prompt(job, job.cached_tokens)
            self._forget()

    def _begin_prompt(self, job: Job, cached: int) -> None:
        left_s = self._times.prefill_s(cached, job.prompt_tokens + job.num_generated)
        if left_s:
            self._prompts.append(_Prompt(job, left_s))
        else:
            self._begin_answer(job)

    def _forget(self) -> None:
        while len(self._kept) > self._num_slots - self._num_running:
            self._kept.popitem(last=False)

    def _prompt_end_s(self) -> float:
        """Seconds to the end of the first prompt to end."""
        if not self._prompts:
            return math.inf
        shortest = self._shortest
        # The oldest has half of each step, or all that nobody else wants.
        work = self._prompts[shortest].left_s
        if shortest:
            work = 2 * min(work, self._prompts[0].left_s)
        step_s = self._step_s
        return work * (1 + step_s / self._times.mixed_s) if step_s else work

    @property
    def _shortest(self) -> int:
        return min(range(len(self._prompts)), key=lambda at: self._prompts[at].left_s)

    def _work_on_prompts(self, work_s: float) -> None:
        shortest = self._shortest
        if shortest == 0:
            self._prompts[0].left_s -= work_s
        else:
            self._prompts[0].left_s -= work_s / 2
            self._prompts[shortest].left_s -= work_s / 2

    def _end_prompts(self) -> None:
        ready = [prompt for prompt in self._prompts if prompt.left_s <= 1e-9]
        if not ready:
            return
        self._prompts = [prompt for prompt in self._prompts if prompt.left_s > 1e-9]
        for prompt in ready:
            self._begin_answer(prompt.job)

    def _begin_answer(self, job: Job) -> None:
        if not job.num_generated:
            job.first_token = self._now + self._times.overhead_s
        job.num_generated += 1
        left = job.output_tokens - job.num_generated
        self._number += 1
        heapq.heappush(self._decoding, (self._count + left, self._number, job))
        self._context += job.prompt_tokens + job.num_generated - self._count

    def _end_answers(self) -> list[Job]:
        ended = []
        while self._decoding and self._decoding[0][0] <= self._count + 1e-6:
            end, _, job = heapq.heappop(self._decoding)
            begun = end - (job.output_tokens - job.num_generated)
            self._context -= job.prompt_tokens + job.num_generated - begun
            job.ended = self._now + self._times.overhead_s
            self._kept[job.key] = job.prompt_tokens + job.output_tokens - 1
            ended.append(job)
        if not self._decoding:
            self._count = self._context = 0.0
        self._forget()
        return ended
