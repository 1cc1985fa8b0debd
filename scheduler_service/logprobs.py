"""Logprobs as callers see them: with the tokens' bytes, and finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from . import request
from .detokenizer import TokenBytes

# What stands for the logarithm of 0: the least float32.
LEAST_LOGPROB = -3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its logprob, its place among all tokens from 1, and its bytes in the output."""

    token_id: int
    logprob: float
    rank: int
    text: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of a token, and of the most likely ones at its place."""

    token: TokenLogprob
    best: tuple[TokenLogprob, ...]


def describe(
    token_ids: Sequence[int], logprobs: Sequence[request.TokenLogprobs], tokens: TokenBytes
) -> tuple[TokenLogprobs, ...]:
    """The logprobs of token_ids, one each. Alternatives of probability 0 are left out."""
    return tuple(
        TokenLogprobs(
            _describe(token_id, found.logprob, found.rank, tokens),
            tuple(
                _describe(best_id, logprob, place, tokens)
                for place, (best_id, logprob) in enumerate(
                    zip(found.best_token_ids, found.best_logprobs, strict=True), start=1
                )
                if math.isfinite(logprob)
            ),
        )
        for token_id, found in zip(token_ids, logprobs, strict=True)
    )


def _describe(token_id: int, logprob: float, rank: int, tokens: TokenBytes) -> TokenLogprob:
    finite = max(logprob, LEAST_LOGPROB)
    return TokenLogprob(token_id, finite, rank, tokens.get(token_id, keep_control=True))
