"""A request in its slot: what is planned for it, and what is known to be done.

The plan runs ahead of the results. A token may be planned before the one it follows is known, since
the worker keeps the last sampled token; only the count of tokens is needed here, and it is exact.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from .prefix_index import NO_MATCH, Match, common_length
from .request import Mask, Request, RequestState
from .step import DecodeRow, LogitAdjustment, PlannedRow, PrefillChunk, Prefix, SlotSetup


@dataclass(slots=True, eq=False)
class Seat:
    """The running part of a request, from admission to its end."""

    request: Request
    slot: int
    generation: int
    # Its row among those that decode, as long as it runs.
    decode_row: int
    # Tokens [0, len) to prefill: the prompt and, after a rebuild, the tokens generated so far.
    prefill_token_ids: array[int] = field(default_factory=lambda: array("I"))
    # Of prefill_token_ids, [0, num_prefill_planned) is in commands, or in a prefix they name.
    num_prefill_planned: int = 0
    # Generated tokens that are known or in commands.
    num_generated_planned: int = 0
    # Positions that the worker has filled, as results say.
    num_computed: int = 0
    # What may be sampled as token number mask_index; only for a request with a constraint.
    mask: Mask | None = None
    mask_index: int = 0
    # Until the first chunk is planned, written by PrefixPlan: tokens that a prefix may cover, the
    # best one at the last look, and seats that will write some of them, with how many.
    wanted: array[int] = field(default_factory=lambda: array("I"))
    found: Match = NO_MATCH
    ahead: list[tuple[Seat, int]] = field(default_factory=list)

    @property
    def is_started(self) -> bool:
        """Its first chunk is planned."""
        return self.num_prefill_planned > 0

    @property
    def num_prefill_left(self) -> int:
        return len(self.prefill_token_ids) - self.num_prefill_planned

    @property
    def num_prefill_ready(self) -> int:
        """Prefill tokens that may be planned now, less a prefix that was found. The last one brings
        a token, for which a mask may be missing."""
        prefix = 0 if self.is_started else self.found.length
        return self.num_prefill_left - prefix - (not self.may_sample)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that are not planned yet; 0 while prefill is not fully planned."""
        if self.num_prefill_left:
            return 0
        return self.request.max_new_tokens - self.num_generated_planned

    @property
    def num_decode_left(self) -> int:
        """Of these, how many decode rows may bring as things are: of a constrained request one, and
        none while it is not known what may come."""
        if self.request.constraint is None:
            return self.num_tokens_left
        return min(self.num_tokens_left, int(self.may_sample))

    @property
    def may_sample(self) -> bool:
        """It is known what may be sampled next."""
        return self.request.constraint is None or (
            self.mask is not None and self.mask_index == self.num_generated_planned
        )

    @property
    def has_logprobs(self) -> bool:
        return self.request.num_logprobs is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some of them are not released yet. (All are before the first token.)"""
        request = self.request
        return request.num_prompt_logprobs is not None and not request.generated_token_ids

    @property
    def num_pending_prefill(self) -> int:
        """Prefill tokens not yet computed."""
        return max(0, len(self.prefill_token_ids) - self.num_computed)

    def shared_with(self, other: Seat) -> int:
        """Of its wanted tokens, those that the other one's begin with too."""
        if self.prefill_token_ids is other.prefill_token_ids:
            return len(self.wanted)
        return common_length(other.prefill_token_ids, self.wanted)

    def take_chunk(self, max_tokens: int, prefix: Prefix | None) -> tuple[PrefillChunk, PlannedRow]:
        """Plans the next chunk, of at most max_tokens (1 to num_prefill_ready) tokens, behind the
        prefix if it is the first one."""
        setup = None if self.is_started else self._setup()
        start = self.num_prefill_planned if prefix is None else prefix.length
        end = min(start + max_tokens, len(self.prefill_token_ids))
        num_filled = end - self.num_prefill_planned
        self.num_prefill_planned = end
        sample = self.num_prefill_left == 0
        wants_prompt = self.wants_prompt_logprobs
        chunk = PrefillChunk(
            slot=self.slot,
            generation=self.generation,
            start=start,
            token_ids=tuple(self.prefill_token_ids[start:end]),
            sample=sample,
            setup=setup,
            prefix=prefix,
            next_token_id=self.prefill_token_ids[end] if wants_prompt and not sample else None,
            allowed_tokens=self._allowed_tokens() if sample else b"",
        )
        self.num_generated_planned += sample
        planned = PlannedRow(
            self.slot,
            self.generation,
            num_filled,
            int(sample),
            sample and self.has_logprobs,
            end - start - sample if wants_prompt else 0,
        )
        return chunk, planned

    def take_decode(self, num_steps: int) -> tuple[DecodeRow, PlannedRow]:
        """Plans a decode row; also what it brings if nothing stops it."""
        num_tokens = min(num_steps, self.num_decode_left)
        row = DecodeRow(self.slot, self.generation, self._allowed_tokens())
        self.num_generated_planned += num_tokens
        return row, PlannedRow(self.slot, self.generation, 0, num_tokens, self.has_logprobs)

    def start(self, generation: int) -> None:
        """In a slot that is new to it: all that is known is to be prefilled, and it goes on there.

        The mask stays: it depends on the number of tokens alone.
        """
        request = self.request
        self.generation = generation
        self.prefill_token_ids = request.known_token_ids()
        self.num_prefill_planned = 0
        self.num_generated_planned = len(request.generated_token_ids)
        self.num_computed = 0
        request.state = RequestState.PREFILL

    def _allowed_tokens(self) -> bytes:
        if self.request.constraint is None:
            return b""
        assert self.mask is not None
        assert self.mask.allowed is not None
        return self.mask.allowed

    def _setup(self) -> SlotSetup:
        request, sampling = self.request, self.request.sampling
        return SlotSetup(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            end_token_ids=tuple(sorted(request.end_token_ids)),
            max_len=request.max_len,
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs if self.wants_prompt_logprobs else None,
            decode_row=self.decode_row,
            masked=request.constraint is not None,
            adjustment=logit_adjustment(request),
        )


def logit_adjustment(request: Request) -> LogitAdjustment | None:
    """What is done to the logits of a request with the tokens that it has; None: nothing."""
    sampling = request.sampling
    repeats = sampling.repetition_penalty != 1
    has_penalty = bool(repeats or sampling.frequency_penalty or sampling.presence_penalty)
    if not (has_penalty or sampling.logit_bias or request.min_new_tokens):
        return None
    min_len = len(request.prompt_token_ids) + request.min_new_tokens
    return LogitAdjustment(
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        prompt_token_ids=tuple(sorted(set(request.prompt_token_ids))) if repeats else (),
        generated_token_ids=tuple(request.generated_token_ids) if has_penalty else (),
        biases=sampling.logit_bias,
        min_len=min_len if request.min_new_tokens else 0,
    )
