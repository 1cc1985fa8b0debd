"""What a step is made of: the commands and results as plain data, and the tensors of one forward.

T is the number of rows (tokens) of a forward. Decode rows come first, then the prefill chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

# The most tokens whose logprobs come beside a sampled one's; kMaxLogprobs of params.h.
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """What is done to logits before they are sampled from: LogitAdjustment of worker.proto.

    `biases`: (token id, bias) pairs.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_token_ids: tuple[int, ...] = ()
    generated_token_ids: tuple[int, ...] = ()
    biases: tuple[tuple[int, float], ...] = ()
    min_len: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `length` positions are those of `source_slot`, which may be the slot itself."""

    source_slot: int
    source_generation: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """How a slot samples and when it stops, until it is taken again.

    `num_logprobs`: best tokens that come with their logprobs beside each sampled one, up to
    MAX_LOGPROBS; 0: the sampled token's logprob alone; -1: none. `num_prompt_logprobs` alike, for
    the tokens of the prompt. `decode_row`: the slot's row among those that decode. `masked`: each
    row that samples brings the tokens that it may sample.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    end_token_ids: tuple[int, ...]
    max_len: int
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    decode_row: int = 0
    masked: bool = False
    adjustment: LogitAdjustment | None = None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens at positions [start, start + len(token_ids)).

    `prefix` only beside `setup`. `next_token_id`: the token after the chunk, -1 where none is
    given. `allowed_tokens`: see Row of worker.proto; b"" for none.
    """

    slot: int
    generation: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    setup: SlotSetup | None
    prefix: Prefix | None = None
    next_token_id: int = -1
    allowed_tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A token a step from the slot's last sampled token; with `allowed_tokens` one token in all."""

    slot: int
    generation: int
    allowed_tokens: bytes = b""


Row = PrefillChunk | DecodeRow


@dataclass(frozen=True, slots=True)
class StepCommand:
    """One batch step, or several decode steps."""

    epoch: int
    step_id: int
    num_steps: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-softmax of a row's logits as they are: of the sampled token, and of the best ones.

    `rank`: that token's place among all, from 1, in the order of `best_token_ids`: logit
    descending, ties by id ascending.
    """

    logprob: float
    rank: int
    best_token_ids: tuple[int, ...]
    best_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row of the command gave; `logprobs` of each token where the slot wants them.

    `prompt_logprobs` of the chunk's tokens that follow another, the one after the chunk included.
    """

    slot: int
    generation: int
    token_ids: tuple[int, ...]
    corrupted: bool
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a command gave; `digest` is a 64-bit hash of everything that was sampled."""

    epoch: int
    step_id: int
    digest: int
    rows: tuple[RowResult, ...]
    duration_ns: int


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Rows [first_row, end_row) of a forward: one slot, positions from `start`.

    With `place`, int32 [3] on a GPU, slot, start and how many of the rows there are stand in it
    when the forward comes to them, and `slot` and `start` mean nothing.
    """

    first_row: int
    end_row: int
    slot: int
    start: int
    place: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one forward.

    token_ids, slots, positions: int32 [T]. Rows [0, num_decode_rows) decode, one per slot; `chunks`
    cover the others. `sample_rows`: rows whose logits are wanted, integers [B], or None for all;
    `sampled_chunks`: those of them that end chunks, as chunks of the batch `sampled` gives. On a
    GPU decode rows are all rows of `table` in order; `slots` and `positions` are theirs alone.
    """

    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    num_decode_rows: int
    chunks: tuple[ChunkSpan, ...]
    sample_rows: Tensor | None
    sampled_chunks: tuple[ChunkSpan, ...] = ()
    table: object = None

    @property
    def num_rows(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def num_sample_rows(self) -> int:
        """B."""
        return self.num_rows if self.sample_rows is None else self.sample_rows.shape[0]

    def sampled(self) -> ForwardBatch:
        """The batch of the rows whose logits are wanted; only for attention."""
        return replace(self, chunks=self.sampled_chunks, sample_rows=None)


def last_rows(num_decode: int, chunks: Sequence[PrefillChunk]) -> tuple[ChunkSpan, ...]:
    """The last row of every chunk that samples, one after another behind the decode rows."""
    sampling = [chunk for chunk in chunks if chunk.sample]
    return tuple(
        ChunkSpan(row, row + 1, chunk.slot, chunk.start + len(chunk.token_ids) - 1)
        for row, chunk in enumerate(sampling, num_decode)
    )


class BatchBuffers:
    """Memory of a ForwardBatch's tensors, allocated once and filled anew for each forward."""

    def __init__(self, max_rows: int) -> None:
        self._token_ids = np.zeros(max_rows, dtype=np.int32)
        self._slots = np.zeros(max_rows, dtype=np.int32)
        self._positions = np.zeros(max_rows, dtype=np.int32)
        self._token_tensor = torch.from_numpy(self._token_ids)
        self._slot_tensor = torch.from_numpy(self._slots)
        self._position_tensor = torch.from_numpy(self._positions)

    def chunk_batch(self, chunks: tuple[PrefillChunk, ...]) -> ForwardBatch:
        """Chunks alone; valid until the next fill."""
        return self.fill([], list(chunks))

    def row_batch(self, slot: int, position: int, token_id: int) -> tuple[ForwardBatch, int]:
        """A decode step of one slot, and the row it has in it; valid until the next fill."""
        return self.fill([(slot, position, token_id)], []), 0

    def fill(self, decode: list[tuple[int, int, int]], chunks: list[PrefillChunk]) -> ForwardBatch:
        """Decode rows (slot, position, token id) and chunks; valid until the next fill."""
        num_decode = len(decode)
        if decode:
            rows = np.array(decode, dtype=np.int32)
            self._slots[:num_decode] = rows[:, 0]
            self._positions[:num_decode] = rows[:, 1]
            self._token_ids[:num_decode] = rows[:, 2]
        first = num_decode
        spans = []
        for chunk in chunks:
            end = first + len(chunk.token_ids)
            self._slots[first:end] = chunk.slot
            self._positions[first:end] = np.arange(chunk.start, chunk.start + end - first)
            self._token_ids[first:end] = chunk.token_ids
            spans.append(ChunkSpan(first, end, chunk.slot, chunk.start))
            first = end
        return ForwardBatch(
            token_ids=self._token_tensor[:first],
            slots=self._slot_tensor[:first],
            positions=self._position_tensor[:first],
            num_decode_rows=num_decode,
            chunks=tuple(spans),
            sample_rows=_sample_rows(num_decode, chunks, spans),
            sampled_chunks=last_rows(num_decode, chunks),
        )


def _sample_rows(
    num_decode: int, chunks: list[PrefillChunk], spans: list[ChunkSpan]
) -> Tensor | None:
    if not chunks:
        return None
    rows = list(range(num_decode))
    rows += [span.end_row - 1 for chunk, span in zip(chunks, spans, strict=True) if chunk.sample]
    return torch.tensor(rows, dtype=torch.int64)
