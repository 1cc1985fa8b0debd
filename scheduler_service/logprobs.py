"""Logprobs as callers see them: with the tokens' bytes, and finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from . import request
from .detokenizer import TokenBytes

# What stands for the logarithm of 0: the least float32.
LEAST_LOGPROB = -3.4028234663852886e38


class TokenLogprob(NamedTuple):
    """A token, its logprob, its place among all tokens from 1, and its bytes in the output."""

    token_id: int
    logprob: float
    rank: int
    text: bytes


class TokenLogprobs(NamedTuple):
    """Of a token, and of the most likely ones at its place."""

    token: TokenLogprob
    best: tuple[TokenLogprob, ...]


def describe(
    token_ids: Sequence[int], logprobs: Sequence[request.TokenLogprobs], tokens: TokenBytes
) -> tuple[TokenLogprobs, ...]:
    """The logprobs of token_ids, one each. Alternatives of probability 0 are left out."""
    return tuple(map(partial(_describe, tokens.get), token_ids, logprobs))


def _describe(
    text_of: Callable[[int, bool], bytes], token_id: int, found: request.TokenLogprobs
) -> TokenLogprobs:
    # Up to 21 entries for each token of each answer: no more calls than must be.
    best = [
        TokenLogprob(best_id, logprob, place, text_of(best_id, True))
        for place, (best_id, logprob) in enumerate(
            zip(found.best_token_ids, found.best_logprobs, strict=True), start=1
        )
        if logprob >= LEAST_LOGPROB
    ]
    logprob = max(found.logprob, LEAST_LOGPROB)
    return TokenLogprobs(
        TokenLogprob(token_id, logprob, found.rank, text_of(token_id, True)), tuple(best)
    )
