"""Runs the forwards of a command on the CPU: at once, decode rows and chunks in one forward."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from worker.batch import BatchBuffers, ForwardBatch, PrefillChunk, SlotSetup
from worker.cpu_backend import CpuBackend
from worker.decoder import Decoder
from worker.runner import CORRUPTED, Drawn, Outcome, StepWork, prompt_rows
from worker.sampler import Sampler


@dataclass(slots=True)
class _Seat:
    """A slot: `num_computed` tokens are in the cache, `last_token` was drawn after them."""

    num_computed: int = 0
    last_token: int = 0
    active: bool = False
    end_token_ids: frozenset[int] = field(default_factory=frozenset)
    max_len: int = 0
    num_prompt_logprobs: int = -1

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
        self._sampler = Sampler(
            backend, limits.num_slots, limits.max_running, decoder.config.vocab_size
        )
        self._buffers = BatchBuffers(limits.max_step_tokens)

    @property
    def max_logprobs_steps(self) -> int:
        """No limit: nothing is under way after `start`."""
        return (1 << 31) - 1

    def take(self, slot: int, setup: SlotSetup, num_kept: int) -> None:
        """See Runner; what is in the cache past a row's position is not read, be it a NaN."""
        self._seats[slot] = _Seat(
            num_computed=num_kept,
            end_token_ids=frozenset(setup.end_token_ids),
            max_len=setup.max_len,
            num_prompt_logprobs=setup.num_prompt_logprobs,
        )
        self._sampler.set_slot(slot, setup)

    def start(self, work: StepWork) -> Outcome:
        """Runs the work."""
        started_ns = time.perf_counter_ns()
        outcome = Outcome([], 0)
        for step in range(work.num_steps):
            # A mask is good for one token.
            slots = [
                slot
                for slot in work.decode_slots
                if self._seats[slot].active and (step == 0 or slot not in work.masks)
            ]
            if not slots and not work.chunks:
                break
            outcome.steps.append(self._step(slots, work, outcome))
        return replace(outcome, duration_ns=time.perf_counter_ns() - started_ns)

    def finish(self, started: Outcome) -> Outcome:
        """What `start` gave."""
        return started

    def gaps_ns(self, count: int) -> list[int]:
        """The CPU never idles: the host is the device."""
        return []

    def _step(self, slots: list[int], work: StepWork, outcome: Outcome) -> list[Drawn]:
        """What was drawn; adds logprobs to the outcome."""
        seats = ((slot, self._seats[slot]) for slot in slots)
        decode = [(slot, seat.num_computed, seat.last_token) for slot, seat in seats]
        batch = self._buffers.fill(decode, list(work.chunks))
        logits = self.decoder.forward(batch)
        for slot in slots:
            self._seats[slot].num_computed += 1
        for chunk in work.chunks:
            self._seats[chunk.slot].num_computed += len(chunk.token_ids)
        drawn = self._draw(logits, [*slots, *work.sampled_slots], work.masks, outcome)
        for chunk, span in zip(work.chunks, batch.chunks, strict=True):
            self._add_prompt_logprobs(batch, chunk, span.first_row, outcome)
        return drawn

    def _draw(
        self, logits: Tensor, slots: list[int], masks: dict[int, bytes], outcome: Outcome
    ) -> list[Drawn]:
        if not slots:
            return []
        # A token's position is its index in the sequence: the number of tokens before it.
        positions = [self._seats[slot].num_computed for slot in slots]
        token_ids = self._sampler.sample(logits, slots, positions, masks)
        for slot, token_id in zip(slots, token_ids, strict=True):
            if token_id == CORRUPTED:
                self._seats[slot].active = False
            else:
                self._seats[slot].accept(token_id)
        for slot, token in self._sampler.logprobs(logits, slots, token_ids).items():
            outcome.logprobs.setdefault(slot, []).append(token)
        return list(zip(slots, token_ids, strict=True))

    def _add_prompt_logprobs(
        self, batch: ForwardBatch, chunk: PrefillChunk, first_row: int, outcome: Outcome
    ) -> None:
        count = self._seats[chunk.slot].num_prompt_logprobs
        if count < 0:
            return
        found = outcome.prompt_logprobs.setdefault(chunk.slot, [])
        for part in prompt_rows(chunk, first_row, self.decoder.max_head_rows):
            rows = torch.tensor(part.rows, dtype=torch.int64)
            logits = self.decoder.head_logits(batch, rows, (part.span,))
            found += self._sampler.logprobs_of(logits, part.token_ids, [count] * len(part.rows))
