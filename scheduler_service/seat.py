"""A request in its slot: what is planned for it, and what is known to be done.

The plan runs ahead of the results. A token may be planned before the one it follows is known, since
the worker keeps the last sampled token; only the count of tokens is needed here, and it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request, RequestState
from .step import DecodeRow, PrefillChunk, SlotSetup


@dataclass(slots=True)
class Seat:
    """The running part of a request, from admission to its end."""

    request: Request
    slot: int
    generation: int
    # Tokens [0, len) to prefill: the prompt and, after a rebuild, the tokens generated so far.
    prefill_token_ids: tuple[int, ...]
    # Of prefill_token_ids, [0, num_prefill_planned) is in commands.
    num_prefill_planned: int = 0
    # Generated tokens that are known or in commands.
    num_generated_planned: int = 0
    # Positions that the worker has computed, as results say.
    num_computed: int = 0

    @property
    def num_prefill_left(self) -> int:
        return len(self.prefill_token_ids) - self.num_prefill_planned

    @property
    def num_decode_left(self) -> int:
        """Tokens that may yet be planned by decode rows; 0 while prefill is not fully planned."""
        if self.num_prefill_left:
            return 0
        return self.request.max_new_tokens - self.num_generated_planned

    @property
    def num_pending_prefill(self) -> int:
        """Prefill tokens not yet computed."""
        return max(0, len(self.prefill_token_ids) - self.num_computed)

    def take_chunk(self, max_tokens: int) -> PrefillChunk:
        """Plans the next chunk, of at most max_tokens (at least 1) tokens."""
        start = self.num_prefill_planned
        token_ids = self.prefill_token_ids[start : start + max_tokens]
        self.num_prefill_planned += len(token_ids)
        sample = self.num_prefill_left == 0
        self.num_generated_planned += sample
        setup = self._setup() if start == 0 else None
        return PrefillChunk(self.slot, self.generation, start, token_ids, sample, setup)

    def take_decode(self, num_steps: int) -> tuple[DecodeRow, int]:
        """Plans a decode row; also gives the tokens it brings if nothing stops it."""
        num_tokens = min(num_steps, self.num_decode_left)
        self.num_generated_planned += num_tokens
        return DecodeRow(self.slot, self.generation), num_tokens

    def restart(self, generation: int) -> None:
        """The worker's state is gone: prefills again what is known, and goes on from there."""
        request = self.request
        self.generation = generation
        self.prefill_token_ids = request.prompt_token_ids + tuple(request.generated_token_ids)
        self.num_prefill_planned = 0
        self.num_generated_planned = len(request.generated_token_ids)
        self.num_computed = 0
        request.state = RequestState.PREFILL

    def _setup(self) -> SlotSetup:
        sampling = self.request.sampling
        return SlotSetup(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            end_token_ids=tuple(sorted(self.request.end_token_ids)),
            max_len=self.request.max_len,
        )
