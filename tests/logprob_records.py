"""Rows of logits that are hard for logprobs, and the check of a record. B rows, V vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tolerances import assert_close
from torch import Tensor

import reference
from worker.batch import MAX_LOGPROBS
from worker.runner import LOGPROBS_RECORD, LOGPROBS_WORDS

# Where nothing was written.
UNTOUCHED = -77
COUNTS = [20, 0, 1, 5, 19]


def hard_logits(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """In turn normal, peaked, with many ties, half masked, all but three masked, all equal,
    ascending, the best side by side, and so far apart that a difference has no float32.
    """
    logits = torch.randn(count, vocab, generator=generator) * 3
    kinds = 9
    logits[1::kinds] *= 5
    logits[2::kinds] = (logits[2::kinds] * 2).round() / 2
    logits[3::kinds, ::2] = -torch.inf
    logits[3::kinds, -1] = 0.0
    logits[4::kinds, :-3] = -torch.inf
    logits[5::kinds] = 1.5
    logits[6::kinds] = torch.arange(vocab) / 1000
    logits[7::kinds, vocab // 2 : vocab // 2 + 700] += 30
    logits[8::kinds, ::3] = 3e38
    logits[8::kinds, 1::3] = -3e38
    return logits


def empty_records(*sizes: int) -> Tensor:
    """int32 [*sizes, 42]; pin it for a GPU."""
    return torch.full((*sizes, LOGPROBS_WORDS), UNTOUCHED, dtype=torch.int32)


def records_in(out: Tensor) -> np.ndarray[Any, Any]:
    """[*sizes]."""
    return np.asarray(out.numpy().view(LOGPROBS_RECORD)[..., 0])


def assert_record(record: Any, logits: Tensor, token_id: int, count: int) -> None:
    """The record of one row as the oracle has it, and nothing behind its best tokens."""
    logprob, rank, ids, logprobs = reference.logprobs(logits, token_id, count)
    found = len(ids)
    assert int(record["rank"]) == rank
    assert record["best_token_ids"].tolist() == ids + [UNTOUCHED] * (MAX_LOGPROBS - found)
    got = torch.tensor([float(record["logprob"]), *record["best_logprobs"][:found].tolist()])
    wanted = torch.tensor([logprob, *logprobs], dtype=torch.float64)
    assert not got.isnan().any()
    assert (got <= 0).all()
    # As float32 has it: what is below its least number is -inf.
    assert_close(got, wanted.float(), "logprobs")
    assert (record["best_logprobs"].view(np.int32)[found:] == UNTOUCHED).all()
