"""A worker without a model: keeps the step protocol to the letter, and its tokens can be predicted.

A token is a function of all tokens that the slot's positions hold, its position and the slot's
sampling, so a swapped slot, a wrong position, prefix or count, or a stale state changes it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler_service.prefix_index import PrefixReuse
from scheduler_service.request import Mask, Request, TokenLogprobs
from scheduler_service.seat import logit_adjustment
from scheduler_service.step import (
    DecodeRow,
    LogitAdjustment,
    PrefillChunk,
    RowResult,
    SlotSetup,
    StepCommand,
    StepResult,
)

_MASK = (1 << 64) - 1

# Given a slot's tokens so far, the next token; None: the fake's own; CORRUPTED: bad logits.
Script = Callable[[Sequence[int]], int | None]
CORRUPTED = -1


class ProtocolViolation(Exception):  # noqa: N818
    """The scheduler sent what worker.proto forbids."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProtocolViolation(message)


def fold(state: int, token_id: int) -> int:
    return ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


@functools.lru_cache(maxsize=1024)
def sampling_key(setup: SlotSetup) -> int:
    """Equal for equal sampling, also after a way over the wire in float32."""
    packed = struct.pack("<ffIf", setup.temperature, setup.top_p, setup.top_k, setup.min_p)
    if setup.adjustment is not None:
        packed += _packed(setup.adjustment)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _packed(adjustment: LogitAdjustment) -> bytes:
    """All but the tokens generated so far, which `draw` is given."""
    return struct.pack(
        f"<fffI{len(adjustment.prompt_token_ids)}I",
        adjustment.frequency_penalty,
        adjustment.presence_penalty,
        adjustment.repetition_penalty,
        adjustment.min_len,
        *adjustment.prompt_token_ids,
    ) + b"".join(struct.pack("<If", *pair) for pair in adjustment.biases)


def draw(
    state: int,
    position: int,
    setup: SlotSetup,
    vocab_size: int,
    generated: Sequence[int] = (),
    allowed: bytes = b"",
) -> int:
    """The fake's token at `position` after tokens folded into `state`; with penalties also of what
    was generated, in whatever order. Of those not allowed the next one that is."""
    value = fold(fold(fold(state, position), setup.seed), sampling_key(setup))
    if setup.adjustment is not None and has_penalty(setup.adjustment):
        for token_id in sorted(generated):
            value = fold(value, token_id)
    token_id = (value >> 33) % vocab_size
    while allowed and not allowed[token_id // 8] >> token_id % 8 & 1:
        token_id = (token_id + 1) % vocab_size
    return token_id


def has_penalty(adjustment: LogitAdjustment) -> bool:
    return bool(
        adjustment.frequency_penalty
        or adjustment.presence_penalty
        or adjustment.repetition_penalty != 1
    )


def fake_logprobs(state: int, token_id: int, num_best: int, vocab_size: int) -> TokenLogprobs:
    """Exact in float32."""
    value = fold(state, token_id)
    best = tuple((value >> 20) + i for i in range(min(num_best, vocab_size)))
    return TokenLogprobs(
        -float(value % 512) / 8,
        value % vocab_size + 1,
        tuple(one % vocab_size for one in best),
        tuple(-float(one % 64) for one in best),
    )


@dataclass(slots=True)
class FakeSlot:
    generation: int = 0
    setup: SlotSetup | None = None
    # Tokens in the cache, and the last sampled one, which is not yet.
    tokens: list[int] = field(default_factory=list)
    # Of `tokens`, so many from the start were written by prefill.
    num_prefilled: int = 0
    pending: int | None = None
    state: int = 0
    active: bool = False
    # With those before the set-up.
    generated: list[int] = field(default_factory=list)

    def consume(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.state = fold(self.state, token_id)


class FakeWorker:
    """Runs StepCommands as a rank does. `script` forces tokens. Time is counted, not taken."""

    def __init__(
        self,
        num_slots: int,
        max_seq_len: int = 4096,
        max_step_tokens: int = 256,
        vocab_size: int = 1000,
        script: Script | None = None,
        step_ns: int = 1_000_000,
        prompt_token_ns: int = 0,
        max_running: int = 0,
        reuse: PrefixReuse = PrefixReuse.ALL,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running or num_slots
        self.reuse = reuse
        self.vocab_size = vocab_size
        self.script = script
        self.step_ns = step_ns
        self.prompt_token_ns = prompt_token_ns
        self.slots = [FakeSlot() for _ in range(num_slots)]
        self.last_step_id = 0
        self.num_prefills = 0
        # Tokens that were computed by prefill, and copied from other slots.
        self.num_prefill_tokens = 0
        self.num_copied_tokens = 0
        self.num_forwards = 0

    def run(self, command: StepCommand) -> StepResult:
        """ProtocolViolation, with nothing done, for a command that breaks the protocol."""
        self._check(command)
        self.last_step_id = command.step_id
        for row in command.rows:
            if isinstance(row, PrefillChunk) and row.setup is not None:
                self._take(row, row.setup)
        drawn = [_Drawn(self, self.slots[row.slot], row) for row in command.rows]
        for number in range(command.num_steps):
            for row in drawn:
                row.run_step(number)
        self.num_forwards += command.num_steps
        rows = tuple(row.result() for row in drawn)
        digest = step_digest(command.step_id, rows)
        num_prefill = sum(
            len(row.token_ids) for row in command.rows if isinstance(row, PrefillChunk)
        )
        self.num_prefill_tokens += num_prefill
        duration_ns = command.num_steps * self.step_ns + num_prefill * self.prompt_token_ns
        return StepResult(command.epoch, command.step_id, digest, rows, duration_ns)

    def _check(self, command: StepCommand) -> None:
        _require(command.step_id == self.last_step_id + 1, f"step id {command.step_id}")
        _require(command.num_steps >= 1, "num_steps below 1")
        _require(len(command.rows) >= 1, "no rows")
        slots = [row.slot for row in command.rows]
        _require(len(set(slots)) == len(slots), "two rows for a slot")
        kinds = [isinstance(row, PrefillChunk) for row in command.rows]
        _require(kinds == sorted(kinds), "a decode row after a chunk")
        _require(command.num_steps == 1 or not any(kinds), "several steps with a chunk")
        num_tokens = sum(
            len(row.token_ids) if isinstance(row, PrefillChunk) else 1 for row in command.rows
        )
        _require(num_tokens <= self.max_step_tokens, f"{num_tokens} tokens in a step")
        taken: set[int] = set()
        decode_rows: set[int] = set()
        for row in command.rows:
            slot, setup = self.slots[row.slot], self.slots[row.slot].setup
            if isinstance(row, PrefillChunk):
                self._check_chunk(slot, row, taken)
                setup = row.setup or setup
            else:
                _require(row.generation == slot.generation, "decode of another generation")
                _require(slot.pending is not None, "decode of a slot that has sampled nothing")
                _check_mask(setup, row.allowed_tokens, samples=True)
            assert setup is not None
            _require(setup.decode_row not in decode_rows, "two slots in a decode row")
            decode_rows.add(setup.decode_row)

    def _check_chunk(self, slot: FakeSlot, row: PrefillChunk, taken: set[int]) -> None:
        _require(len(row.token_ids) >= 1, "empty chunk")
        setup, start = slot.setup, len(slot.tokens)
        if row.setup is not None:
            setup, start = row.setup, 0 if row.prefix is None else row.prefix.length
            _require(row.generation > slot.generation, "first chunk without a new generation")
            _require(setup.max_len <= self.max_seq_len, "max_len above max_seq_len")
            _require(setup.decode_row < self.max_running, "no such decode row")
            self._check_prefix(row, taken)
            taken.add(row.slot)
        else:
            _require(row.prefix is None, "a prefix without a set-up")
            _require(row.generation == slot.generation, "chunk of another generation")
            _require(slot.pending is None, "chunk after the prompt's end")
        assert setup is not None
        _require(row.start == start, f"chunk at {row.start}, not {start}")
        _check_mask(setup, row.allowed_tokens, samples=row.sample)
        wants_next = setup.num_prompt_logprobs is not None and not row.sample
        _require((row.next_token_id is not None) == wants_next, "next_token_id")

    def _check_prefix(self, row: PrefillChunk, taken: set[int]) -> None:
        if row.prefix is None:
            return
        assert row.setup is not None
        _require(row.setup.num_prompt_logprobs is None, "prompt logprobs of a prefix")
        _require(row.prefix.source_slot not in taken, "a prefix of a slot that was taken anew")
        source, length = self.slots[row.prefix.source_slot], row.prefix.length
        _require(source.generation == row.prefix.source_generation, "a prefix of a former tenant")
        written = {
            PrefixReuse.ALL: len(source.tokens),
            PrefixReuse.PREFILL: source.num_prefilled,
            PrefixReuse.NONE: 0,
        }
        _require(1 <= length <= written[self.reuse], f"a prefix of {length} positions")

    def _take(self, row: PrefillChunk, setup: SlotSetup) -> None:
        slot = FakeSlot(row.generation, setup, active=True)
        if setup.adjustment is not None:
            slot.generated = list(setup.adjustment.generated_token_ids)
        if row.prefix is not None:
            for token_id in self.slots[row.prefix.source_slot].tokens[: row.prefix.length]:
                slot.consume(token_id)
            slot.num_prefilled = row.prefix.length
            self.num_copied_tokens += row.prefix.length * (row.prefix.source_slot != row.slot)
        self.slots[row.slot] = slot
        self.num_prefills += 1


def _check_mask(setup: SlotSetup | None, allowed: bytes, samples: bool) -> None:
    assert setup is not None
    _require(bool(allowed) == (setup.masked and samples), "a mask where none is due, or none")


class _Drawn:
    """A row of the command that runs, and what it brings."""

    def __init__(self, worker: FakeWorker, slot: FakeSlot, row: PrefillChunk | DecodeRow) -> None:
        self.worker, self.slot, self.row = worker, slot, row
        self.sampled: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []

    def run_step(self, number: int) -> None:
        if isinstance(self.row, PrefillChunk):
            self._prefill(self.row)
        elif self.slot.active and not (number and self.row.allowed_tokens):
            assert self.slot.pending is not None
            self.slot.consume(self.slot.pending)
            self._sample()

    def _prefill(self, row: PrefillChunk) -> None:
        slot = self.slot
        assert slot.setup is not None
        num_best = slot.setup.num_prompt_logprobs
        following = [*row.token_ids[1:], row.next_token_id]
        for token_id, next_id in zip(row.token_ids, following, strict=True):
            slot.consume(token_id)
            if num_best is not None and next_id is not None:
                vocab_size = self.worker.vocab_size
                self.prompt_logprobs.append(
                    fake_logprobs(slot.state, next_id, num_best, vocab_size)
                )
        slot.num_prefilled = len(slot.tokens)
        if row.sample:
            self._sample()

    def _sample(self) -> None:
        slot, worker = self.slot, self.worker
        setup = slot.setup
        assert setup is not None
        token_id = worker.script(slot.tokens) if worker.script is not None else None
        if token_id is None:
            allowed = self.row.allowed_tokens
            position = len(slot.tokens)
            token_id = draw(slot.state, position, setup, worker.vocab_size, slot.generated, allowed)
        self.sampled.append(token_id)
        slot.generated.append(token_id)
        slot.pending = token_id
        if setup.num_logprobs is not None and token_id != CORRUPTED:
            self.logprobs.append(
                fake_logprobs(slot.state, token_id, setup.num_logprobs, worker.vocab_size)
            )
        at_limit = len(slot.tokens) + 1 >= setup.max_len
        if token_id == CORRUPTED or token_id in setup.end_token_ids or at_limit:
            slot.active = False

    def result(self) -> RowResult:
        return RowResult(
            self.row.slot,
            self.row.generation,
            tuple(token for token in self.sampled if token != CORRUPTED),
            CORRUPTED in self.sampled,
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
        )


def step_digest(step_id: int, rows: Sequence[RowResult]) -> int:
    digest = hashlib.blake2b(struct.pack("<Q", step_id), digest_size=8)
    for row in rows:
        digest.update(struct.pack("<IQ?", row.slot, row.generation, row.corrupted))
        digest.update(struct.pack(f"<{len(row.token_ids)}I", *row.token_ids))
    return int.from_bytes(digest.digest(), "little")


def tokens_alone(
    request: Request, vocab_size: int = 1000, script: Script | None = None
) -> list[int]:
    """The tokens that the fake gives this request when nothing else runs."""
    setup = _setup_alone(request)
    mask = request.first_mask
    tokens = list(request.prompt_token_ids)
    state = 0
    for token_id in tokens:
        state = fold(state, token_id)
    generated: list[int] = []
    while len(generated) < request.max_new_tokens:
        token_id = script(tokens) if script is not None else None
        if token_id is None:
            allowed = b"" if mask is None or mask.allowed is None else mask.allowed
            token_id = draw(state, len(tokens), setup, vocab_size, generated, allowed)
        generated.append(token_id)
        tokens.append(token_id)
        state = fold(state, token_id)
        if token_id in request.end_token_ids:
            break
        if isinstance(request.constraint, FakeConstraint):
            mask = request.constraint.mask_after(generated)
            if mask.allowed is None:
                break
    return generated


def logprobs_alone(
    request: Request, token_ids: Sequence[int], vocab_size: int = 1000
) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """The logprobs of its prompt and of its tokens that the fake gives this request."""
    state, of_prompt, of_tokens = 0, [], []
    num_prompt = len(request.prompt_token_ids)
    for position, token_id in enumerate((*request.prompt_token_ids, *token_ids)):
        if position >= num_prompt and request.num_logprobs is not None:
            of_tokens.append(fake_logprobs(state, token_id, request.num_logprobs, vocab_size))
        elif 0 < position < num_prompt and request.num_prompt_logprobs is not None:
            of_prompt.append(
                fake_logprobs(state, token_id, request.num_prompt_logprobs, vocab_size)
            )
        state = fold(state, token_id)
    return of_prompt, of_tokens


def _setup_alone(request: Request) -> SlotSetup:
    sampling = request.sampling
    return SlotSetup(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.seed,
        (),
        0,
        adjustment=logit_adjustment(dataclasses.replace(request, generated_token_ids=[])),
    )


class FakeConstraint:
    """Allows tokens by what was sampled before: about half of them, and after num_tokens none."""

    def __init__(self, num_tokens: int, vocab_size: int, is_complete: bool = True) -> None:
        self.num_tokens = num_tokens
        self.vocab_size = vocab_size
        self.is_complete = is_complete
        self.token_ids: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> Mask:
        self.token_ids += token_ids
        return self.mask_after(self.token_ids)

    def mask_after(self, token_ids: Sequence[int]) -> Mask:
        if len(token_ids) >= self.num_tokens:
            return Mask(None, self.is_complete)
        state = 0
        for token_id in token_ids:
            state = fold(state, token_id)
        bits = sum(1 << i for i in range(self.vocab_size) if fold(state, i) >> 40 & 1)
        return Mask((bits or 1).to_bytes((self.vocab_size + 7) // 8, "little"), False)
