"""Runs the forwards of a command on the CPU: at once, decode rows and chunks in one forward."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from worker.batch import BatchBuffers, SlotSetup, TokenLogprobs
from worker.cpu_backend import CpuBackend
from worker.decoder import Decoder
from worker.runner import CORRUPTED, Drawn, Outcome, StepWork
from worker.sampler import Sampler


@dataclass(slots=True)
class _Seat:
    """A slot: `num_computed` tokens are in the cache, `last_token` was drawn after them."""

    num_computed: int = 0
    last_token: int = 0
    active: bool = False
    end_token_ids: frozenset[int] = field(default_factory=frozenset)
    max_len: int = 0

    def accept(self, token_id: int) -> None:
        """The next token was drawn; the slot stops at an end id and at its length."""
        self.last_token = token_id
        self.active = token_id not in self.end_token_ids and self.num_computed + 1 < self.max_len


class CpuRunner:
    """The twin of CudaRunner; `start` does all the work."""

    def __init__(self, decoder: Decoder, backend: CpuBackend) -> None:
        limits = decoder.limits
        self.decoder = decoder
        self._seats = [_Seat() for _ in range(limits.num_slots)]
        self._sampler = Sampler(backend, limits.num_slots, decoder.config.vocab_size)
        self._buffers = BatchBuffers(limits.max_step_tokens)

    def take(self, slot: int, setup: SlotSetup) -> None:
        """A new tenant; nothing of the old one stays."""
        self._seats[slot] = _Seat(
            end_token_ids=frozenset(setup.end_token_ids), max_len=setup.max_len
        )
        self._sampler.set_slot(slot, setup)

    def start(self, work: StepWork) -> Outcome:
        """Runs the work."""
        started_ns = time.perf_counter_ns()
        steps: list[list[Drawn]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for _ in range(work.num_steps):
            slots = [slot for slot in work.decode_slots if self._seats[slot].active]
            if not slots and not work.chunks:
                break
            steps.append(self._step(slots, work, logprobs))
        return Outcome(steps, time.perf_counter_ns() - started_ns, logprobs)

    def finish(self, started: Outcome) -> Outcome:
        """What `start` gave."""
        return started

    def gaps_ns(self, count: int) -> list[int]:
        """The CPU never idles: the host is the device."""
        return []

    def _step(
        self, slots: list[int], work: StepWork, logprobs: dict[int, list[TokenLogprobs]]
    ) -> list[Drawn]:
        """What was drawn; adds to `logprobs`."""
        seats = ((slot, self._seats[slot]) for slot in slots)
        decode = [(slot, seat.num_computed, seat.last_token) for slot, seat in seats]
        logits = self.decoder.forward(self._buffers.fill(decode, list(work.chunks)))
        for slot in slots:
            self._seats[slot].num_computed += 1
        for chunk in work.chunks:
            self._seats[chunk.slot].num_computed += len(chunk.token_ids)
        sampled = [*slots, *work.sampled_slots]
        if not sampled:
            return []
        drawn = self._draw(logits, sampled)
        token_ids = [token_id for _, token_id in drawn]
        for slot, token in self._sampler.logprobs(logits, sampled, token_ids).items():
            logprobs.setdefault(slot, []).append(token)
        return drawn

    def _draw(self, logits: Tensor, slots: list[int]) -> list[Drawn]:
        # A token's position is its index in the sequence: the number of tokens before it.
        positions = [self._seats[slot].num_computed for slot in slots]
        token_ids = self._sampler.sample(logits, slots, positions)
        for slot, token_id in zip(slots, token_ids, strict=True):
            if token_id == CORRUPTED:
                # Its cache is zeroed, so that nothing can spread.
                self._seats[slot].active = False
                self.decoder.cache.clear(slot)
            else:
                self._seats[slot].accept(token_id)
        return list(zip(slots, token_ids, strict=True))
