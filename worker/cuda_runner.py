"""Runs the forwards of commands on a GPU: decode steps as replays of one CUDA graph.

`start` only puts work on the stream, so several commands can be under way and the GPU goes from one
to the next without the host. Slots become rows of the slot table here, and are slots again in what
comes back; chunks alone know the cache's slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from worker._native import CudaOps
from worker.batch import ForwardBatch, SlotSetup, TokenLogprobs
from worker.cuda_backend import CudaBackend
from worker.cuda_prefill import Capture, CudaPrefill
from worker.cuda_slots import CudaSlots, adjust_flags
from worker.decoder import Decoder
from worker.errors import StepError
from worker.runner import (
    CORRUPTED,
    LOGPROBS_RECORD,
    Drawn,
    Outcome,
    PromptRows,
    StepWork,
    prompt_rows,
    read_logprobs,
)

_IDLE = -2


@dataclass(frozen=True, slots=True)
class Variant:
    """What a step does beside drawing: who wants nothing of it pays nothing."""

    logprobs: bool
    adjusted: bool


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Records of the parts' tokens, one part after another; best tokens beside each part's."""

    records: Tensor
    parts: list[tuple[PromptRows, int]]


@dataclass(frozen=True, slots=True)
class Started:
    """Work on the stream: between two events; the rows of the ring its steps write.

    `rows`: of the table, by slot, as they are now. `num_logprobs`: of its slots that want any, as
    their tenants want them.
    """

    work: StepWork
    begin: torch.cuda.Event
    end: torch.cuda.Event
    decode_rows: list[int]
    sample_row: int | None
    rows: dict[int, int]
    num_logprobs: dict[int, int]
    prompt_logprobs: PromptLogprobs | None

    @property
    def ring_rows(self) -> list[int]:
        """In the order of the steps."""
        return self.decode_rows + ([] if self.sample_row is None else [self.sample_row])


class CudaRunner:
    """The twin of CpuRunner; used from the thread that made its stream current."""

    def __init__(self, decoder: Decoder, backend: CudaBackend, slots: CudaSlots) -> None:
        rows, vocab_size = decoder.limits.max_running, decoder.config.vocab_size
        self.decoder = decoder
        self._ops = backend
        self._slots = slots
        self._batch = slots.decode_batch()
        # Tenants that the table does not have yet; those of all slots.
        self._taken: dict[int, SlotSetup] = {}
        self._tenants: dict[int, SlotSetup] = {}
        # Rows of the ring, ever: asked for by `start`, and read by `finish`.
        self._rows_begun = self._rows_read = 0
        size = CudaOps.sample_workspace(rows, vocab_size)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=backend.device)
        self._adjusted = backend.floats(rows, vocab_size)
        self._steps: dict[Variant, Callable[[], None]] = {
            variant: partial(self._decode_step, variant)
            for variant in (Variant(*flags) for flags in product((False, True), repeat=2))
        }
        capture = Capture(backend.stream) if decoder.group.capturable else None
        if capture is not None:
            self._steps = self._captured(capture)
        self._chunks = CudaPrefill(decoder, backend, slots, capture)

    @property
    def max_logprobs_steps(self) -> int:
        """See Runner; a step with chunks may take two rows of the ring of logprobs."""
        return len(self._slots.logprobs) // 2

    def take(self, slot: int, setup: SlotSetup, num_kept: int) -> None:
        """A new tenant with the next work. The cache stays as it is: no row reads past its own."""
        self._taken[slot] = self._tenants[slot] = setup

    def start(self, work: StepWork) -> Started:
        """Puts the work on the stream. StepError if results that nobody has read would be lost."""
        rows = {slot: self._tenants[slot].decode_row for slot in _sampling(work)}
        num_logprobs = self._wanted_logprobs(work)
        variant = Variant(bool(num_logprobs), self._is_adjusted(work))
        num_steps = 1 if work.masks.keys() >= set(work.decode_slots) else work.num_steps
        self._claim_rows(2 if work.chunks else num_steps, variant.logprobs)
        begin, end = _event(), _event()
        begin.record()
        decode_rows: list[int] = []
        sample_row = prompt_logprobs = None
        if work.decode_slots:
            self._slots.schedule({rows[slot]: slot in work.masks for slot in work.decode_slots})
        if work.chunks:
            decode_rows, sample_row, prompt_logprobs = self._prefill(work, rows, variant)
        else:
            self._slots.allow({rows[slot]: mask for slot, mask in work.masks.items()})
            for _ in range(num_steps):
                self._steps[variant]()
                decode_rows.append(self._slots.next_ring_row())
        end.record()
        started = Started(
            work, begin, end, decode_rows, sample_row, rows, num_logprobs, prompt_logprobs
        )
        self._rows_begun += len(started.ring_rows)
        return started

    def finish(self, started: Started) -> Outcome:
        """Waits for the device and reads the ring."""
        _enter(self._ops.device)
        started.end.synchronize()
        self.decoder.group.check()
        work, ring = started.work, self._slots.ring
        slots = [work.decode_slots] * len(started.decode_rows)
        if started.sample_row is not None:
            slots.append(work.sampled_slots)
        steps = [
            _drawn(ring[row].tolist(), drawing, started.rows)
            for row, drawing in zip(started.ring_rows, slots, strict=True)
        ]
        logprobs = self._read_logprobs(started, steps)
        self._rows_read += len(started.ring_rows)
        duration_ns = int(started.begin.elapsed_time(started.end) * 1e6)
        return Outcome(steps, duration_ns, logprobs, _read_prompts(started.prompt_logprobs))

    def gaps_ns(self, count: int) -> list[int]:
        """By the device's clock; the last `count` steps must have been nothing but decode steps."""
        stamps = self._slots.last_stamps(count)
        return list((stamps[1:, 0] - stamps[:-1, 1]).tolist())

    def _is_adjusted(self, work: StepWork) -> bool:
        return any(adjust_flags(self._tenants[slot]) for slot in _sampling(work))

    def _wanted_logprobs(self, work: StepWork) -> dict[int, int]:
        """By slot, where it wants logprobs: how many of the best tokens."""
        counts = {slot: self._tenants[slot].num_logprobs for slot in _sampling(work)}
        return {slot: self._at_most(count) for slot, count in counts.items() if count >= 0}

    def _at_most(self, count: int) -> int:
        """Best tokens that there are."""
        return min(count, self.decoder.config.vocab_size)

    def _read_logprobs(
        self, started: Started, steps: list[list[Drawn]]
    ) -> dict[int, list[TokenLogprobs]]:
        """From the rows of the ring that `steps` were read from."""
        if not started.num_logprobs:
            return {}
        records = self._slots.logprobs
        found: dict[int, list[int]] = {slot: [] for slot in started.num_logprobs}
        for ring_row, drawn in zip(started.ring_rows, steps, strict=True):
            for slot, token_id in drawn:
                if slot in found and token_id != CORRUPTED:
                    found[slot].append(ring_row % len(records))
        return {
            slot: read_logprobs(records[places, started.rows[slot]], started.num_logprobs[slot])
            for slot, places in found.items()
        }

    def _claim_rows(self, count: int, logprobs: bool) -> None:
        under_way = self._rows_begun - self._rows_read
        most = len(self._slots.logprobs if logprobs else self._slots.ring)
        if under_way + count > most:
            raise StepError(
                f"{count} steps{' with logprobs' if logprobs else ''} after {under_way} whose "
                f"results were not read; at most {most}"
            )

    def _prefill(
        self, work: StepWork, rows: dict[int, int], variant: Variant
    ) -> tuple[list[int], int | None, PromptLogprobs | None]:
        """One forward of the chunks, and of the whole table if some slots decode.

        The rows of the ring, as Started has them, and the logprobs of the prompts.
        """
        decode_rows: list[int] = []
        sample_row = None
        mixed = bool(work.decode_slots)
        batch, logits = self._chunks.forward(work.chunks, mixed)
        # Not before: the forward reads nothing of new tenants and masks, and it is waited for.
        for slot, setup in self._taken.items():
            self._slots.take(slot, setup)
        self._taken.clear()
        self._slots.allow({rows[slot]: mask for slot, mask in work.masks.items()})
        if mixed:
            self._sample(logits[: self._slots.num_rows], None, variant)
            decode_rows.append(self._slots.next_ring_row())
            logits = logits[self._slots.num_rows :]
        lengths = {
            rows[chunk.slot]: chunk.start + len(chunk.token_ids)
            for chunk in work.chunks
            if chunk.sample
        }
        if lengths:
            self._sample(logits[: len(lengths)], self._slots.arrive(lengths), variant)
            sample_row = self._slots.next_ring_row()
        return decode_rows, sample_row, self._prompt_logprobs(work, batch)

    def _prompt_logprobs(self, work: StepWork, batch: ForwardBatch) -> PromptLogprobs | None:
        """Of the chunks whose slots want them, from what the forward has left."""
        parts = []
        for chunk, span in zip(work.chunks, batch.chunks, strict=True):
            count = self._at_most(self._tenants[chunk.slot].num_prompt_logprobs)
            if count >= 0:
                limit = self.decoder.max_head_rows
                parts += [(part, count) for part in prompt_rows(chunk, span.first_row, limit)]
        if not parts:
            return None
        rows = [row for part, _ in parts for row in part.rows]
        token_ids = [token_id for part, _ in parts for token_id in part.token_ids]
        sent = self._slots.send_ints(rows + token_ids).view(2, -1)
        records = self._slots.empty_records(len(rows))
        first = 0
        for part, count in parts:
            places = slice(first, first + len(part.rows))
            logits = self.decoder.head_logits(batch, sent[0, places], (part.span,))
            self._ops.token_logprobs(logits, sent[1, places], count, records[places])
            first = places.stop
        return PromptLogprobs(records, parts)

    def _sample(self, logits: Tensor, rows: Tensor | None, variant: Variant) -> None:
        table, drawn_from = self._slots.table, logits
        if variant.adjusted:
            drawn_from = self._adjusted[: logits.shape[0]]
            self._ops.adjust_logits(table, self._slots.adjust, logits, rows, drawn_from)
        self._ops.sample(table, drawn_from, rows, self._workspace)
        if variant.logprobs:
            out = self._slots.logprobs_out
            self._ops.logprobs(table, logits, rows, self._slots.num_logprobs, out)

    def _captured(self, capture: Capture) -> dict[Variant, Callable[[], None]]:
        """The decode steps as one launch each."""
        # All before, so that libraries and kernels are loaded and their memory is there.
        for step in self._steps.values():
            step()
            self._slots.next_ring_row()
        return {variant: capture(step) for variant, step in self._steps.items()}

    def _decode_step(self, variant: Variant) -> None:
        logits = self.decoder.forward(self._batch)[: self._slots.num_rows]
        self._sample(logits, None, variant)


def _enter(device: torch.device) -> None:
    """A thread that was never told its GPU may open GPU 0 when it waits, and take memory there."""
    torch.cuda.set_device(device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _sampling(work: StepWork) -> tuple[int, ...]:
    """Slots that a token may be drawn for."""
    return (*work.decode_slots, *work.sampled_slots)


def _drawn(tokens: list[int], slots: tuple[int, ...], rows: dict[int, int]) -> list[Drawn]:
    """From a row of the ring: who took part."""
    drawn = ((slot, tokens[rows[slot]]) for slot in slots)
    return [(slot, token_id) for slot, token_id in drawn if token_id != _IDLE]


def _read_prompts(prompts: PromptLogprobs | None) -> dict[int, list[TokenLogprobs]]:
    found: dict[int, list[TokenLogprobs]] = {}
    if prompts is None:
        return found
    records, first = prompts.records.numpy().view(LOGPROBS_RECORD)[:, 0], 0
    for part, count in prompts.parts:
        end = first + len(part.rows)
        found.setdefault(part.slot, []).extend(read_logprobs(records[first:end], count))
        first = end
    return found
