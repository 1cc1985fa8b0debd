"""The oracle: every operator of the native library in plain torch and numpy, in float64.

Nothing here is fast or calls the library. Dimension letters as in `worker/_native.pyi`.
"""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> float64 [..., H]."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> float64 [T, N]."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> float64 [T, I]."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def rope_tables(num_positions: int, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [P, D/2]."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [T, n, D], cos and sin [T, D/2] of each row -> float64 [T, n, D], halves rotated."""
    first, second = heads.double().chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One row: q [H_q, D], keys and values [n, H_kv, D] that it attends -> float64 [H_q, D]."""
    group = q.shape[0] // keys.shape[1]
    wide_keys = keys.double().repeat_interleave(group, dim=1)
    wide_values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", q.double(), wide_keys) * scale
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), wide_values)


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-10: counters uint32 [n, 4] under the key `seed` (64 bits) -> uint32 [n, 4]."""
    words = [counter[:, i].astype(np.uint64) for i in range(4)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (b >> np.uint64(32)) ^ words[1] ^ np.uint64(key[0]),
            b & low,
            (a >> np.uint64(32)) ^ words[3] ^ np.uint64(key[1]),
            a & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(words, axis=1).astype(np.uint32)


def gumbel(vocab: int, seed: int, position: int) -> np.ndarray:
    """Noise float64 [V]: token id i has word i // 16 % 4 of counter i // 64 * 16 + i % 16."""
    ids = np.arange(vocab)
    counter = np.zeros((vocab, 4), np.uint32)
    counter[:, 0] = ids // 64 * 16 + ids % 16
    counter[:, 1] = position
    words = philox(counter, seed)[ids, ids // 16 % 4]
    return -np.log(-np.log1p(-(words + 0.5) / 2**32))


def kept_tokens(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool [V]: what the filters leave of scaled float64 [V], by a full sort."""
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    weights = np.exp(scaled[order] - scaled.max())
    keep = np.ones(len(scaled), bool)
    if top_k:
        keep[top_k:] = False
    reached = np.cumsum(weights * keep) >= top_p * (weights * keep).sum()
    if top_p < 1 and reached.any():
        keep[np.argmax(reached) + 1 :] = False
    keep &= weights >= min_p
    kept = np.zeros(len(scaled), bool)
    kept[order[keep]] = True
    return kept


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """The token id of one row of logits [V]; -1 for a row that cannot be sampled."""
    row = logits.double().numpy()
    if np.isnan(row).any() or not np.isfinite(row.max()):
        return -1
    if temperature == 0:
        return int(row.argmax())
    scaled = (row - row.max()) / temperature
    kept = kept_tokens(scaled, top_k, top_p, min_p)
    noisy = scaled + gumbel(len(row), seed & (2**64 - 1), position)
    return int(np.where(kept, noisy, -math.inf).argmax())


def logprobs(
    logits: Tensor, token_id: int, count: int
) -> tuple[float, int, list[int], list[float]]:
    """Of one row of logits [V]: the token's logprob and rank, the best tokens, their logprobs."""
    row = logits.double().numpy()
    scaled = row - row.max()
    values = scaled - math.log(np.exp(scaled).sum())
    order = np.lexsort((np.arange(len(row)), -row))
    best = order[:count].tolist()
    rank = int(np.flatnonzero(order == token_id)[0]) + 1
    return float(values[token_id]), rank, best, values[best].tolist()


def adjusted(
    logits: Tensor,
    length: int,
    *,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    prompt: Iterable[int] = (),
    generated: Iterable[int] = (),
    biases: Iterable[tuple[int, float]] = (),
    ends: Iterable[int] = (),
    min_len: int = 0,
) -> Tensor:
    """One row of logits float32 [V] as a sequence of `length` tokens goes on from it.

    Token by token, each operation rounded to float32; `prompt` and `generated` with repeats.
    """
    one = np.float32
    counts, seen = Counter(generated), set(prompt)
    row = logits.numpy().copy()
    for token_id in range(len(row)):
        value = row[token_id]
        if token_id in counts or token_id in seen:
            value = (
                one(value / one(repetition_penalty))
                if value > 0
                else one(value * one(repetition_penalty))
            )
        if token_id in counts:
            value = one(value - one(one(frequency_penalty) * one(counts[token_id])))
            value = one(value - one(presence_penalty))
        for biased, bias in biases:
            value = one(value + one(bias)) if biased == token_id else value
        row[token_id] = -math.inf if length < min_len and token_id in ends else value
    return torch.from_numpy(row)


def masked(logits: Tensor, allowed: Iterable[int]) -> Tensor:
    """One row of logits [V], -infinity but for the allowed tokens."""
    row = torch.full_like(logits, -math.inf)
    for token_id in set(allowed):
        row[token_id] = logits[token_id]
    return row
