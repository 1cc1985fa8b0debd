"""Wrong arguments are refused with an error that names the operator, before anything is written."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from worker import _native

Change = dict[str, object]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def arguments(ops: _native.CpuOps) -> dict[str, dict[str, object]]:
    """Good arguments of every operator: 2 rows, 4 query and 2 KV heads of 8, 3 slots of 6."""
    cache = {"k_cache": torch.zeros(3, 6, 2, 8), "v_cache": torch.zeros(3, 6, 2, 8)}
    rows = {"slots": ints(0, 2), "positions": ints(1, 5)}
    qkv, out = torch.zeros(2, 64), torch.zeros(2, 32)
    tables = {"cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4)}
    norms = {"q_norm": torch.ones(8), "k_norm": torch.ones(8), "eps": 1e-5}
    norm = {"weight": torch.ones(8), "eps": 1e-5, "out": torch.zeros(2, 8)}
    filters = {"top_p": floats(1, 1), "min_p": floats(0, 0), "top_k": ints(0, 0)}
    keys = {"seeds": torch.zeros(2, dtype=torch.int64), "positions": ints(0, 0)}
    weight = ops.pack(torch.ones(5, 8))
    return {
        "pack": {"weight": torch.ones(5, 8), "bias": torch.ones(5)},
        "linear": {"x": torch.zeros(2, 8), "weight": weight, "out": torch.zeros(2, 5)},
        "embed": {
            "token_ids": ints(1, 2),
            "weight": weight,
            "first_id": 0,
            "out": torch.zeros(2, 8),
        },
        "rms_norm": {"x": torch.zeros(2, 8), **norm},
        "add_rms_norm": {"residual": torch.zeros(2, 8), "delta": torch.zeros(2, 8), **norm},
        "rope_append": {"qkv": qkv, **norms, **tables, **rows, **cache},
        "decode_attention": {"qkv": qkv, **cache, **rows, "scale": 1.0, "out": out},
        "prefill_attention": {
            "qkv": qkv,
            **cache,
            "slot": 0,
            "start": 4,
            "scale": 1.0,
            "out": out,
        },
        "silu_mul": {"gate_up": torch.zeros(2, 8), "out": torch.zeros(2, 4)},
        "sample": {
            "logits": torch.zeros(2, 9),
            "temperature": floats(1, 1),
            **filters,
            **keys,
            "out": ints(7, 7),
        },
    }


BAD: list[tuple[str, Change, str]] = [
    ("pack", {"weight": torch.ones(0, 8), "bias": None}, "at least 1, got [0, 8]"),
    ("pack", {"weight": torch.ones(5, 8).double()}, "weight of float32 or bfloat16"),
    ("pack", {"bias": torch.ones(6)}, "bias of shape [5], got [6]"),
    ("pack", {"bias": torch.ones(10)[::2]}, "contiguous"),
    ("linear", {"x": torch.zeros(2, 7)}, "x of shape [2, 8], got [2, 7]"),
    ("linear", {"x": torch.zeros(8, 2).T}, "x contiguous in its last dimension, got stride 2"),
    ("linear", {"out": torch.zeros(3, 5)}, "out of shape [2, 5], got [3, 5]"),
    ("linear", {"out": torch.zeros(1, 5).expand(2, 5)}, "stride"),
    ("linear", {"x": torch.zeros(2, 8).double()}, "x of float32, got float64"),
    ("linear", {"x": torch.zeros(8)}, "x of 2 dimensions, got shape [8]"),
    ("embed", {"out": torch.zeros(2, 9)}, "out of shape [2, 8]"),
    ("embed", {"token_ids": torch.zeros(2, dtype=torch.int64)}, "token_ids of int32, got int64"),
    ("rms_norm", {"weight": torch.ones(7)}, "weight of shape [8], got [7]"),
    ("rms_norm", {"eps": float("nan")}, "eps in [0, 1)"),
    ("rms_norm", {"eps": -1.0}, "eps in [0, 1)"),
    ("rms_norm", {"x": torch.zeros(2, 0)}, "at least one column"),
    ("add_rms_norm", {"delta": torch.zeros(1, 8)}, "delta of shape [2, 8]"),
    ("rope_append", {"q_norm": None}, "both of q_norm and k_norm"),
    ("rope_append", {"q_norm": torch.ones(9)}, "q_norm of shape [8]"),
    ("rope_append", {"cos": torch.zeros(6, 8)}, "cos of shape [6, 4]"),
    ("rope_append", {"sin": torch.zeros(5, 4)}, "sin of shape [6, 4]"),
    ("rope_append", {"slots": ints(0, 3)}, "slots[1] in [0, 3), got 3"),
    ("rope_append", {"positions": ints(-1, 0)}, "positions[0] in [0, 6), got -1"),
    ("rope_append", {"positions": ints(1, 6)}, "positions[1] in [0, 6), got 6"),
    ("rope_append", {"slots": ints(1, 1), "positions": ints(5, 5)}, "rows 0 and 1"),
    ("rope_append", {"positions": ints(0)}, "positions of shape [2]"),
    ("rope_append", {"cos": torch.zeros(5, 4), "sin": torch.zeros(5, 4)}, "[0, 5), got 5"),
    ("decode_attention", {"qkv": torch.zeros(2, 63)}, "got [2, 63]"),
    ("decode_attention", {"qkv": torch.zeros(2, 32)}, "H_q a multiple of 2, got [2, 32]"),
    ("decode_attention", {"qkv": torch.zeros(2, 56)}, "H_q a multiple of 2, got [2, 56]"),
    ("decode_attention", {"slots": ints(-1, 0)}, "slots[0] in [0, 3), got -1"),
    ("decode_attention", {"positions": ints(0, 6)}, "positions[1] in [0, 6), got 6"),
    ("decode_attention", {"scale": float("inf")}, "a finite scale"),
    ("decode_attention", {"out": torch.zeros(2, 31)}, "out of shape [2, 32]"),
    ("decode_attention", {"k_cache": torch.zeros(3, 6, 2, 7)}, "v_cache of shape"),
    ("decode_attention", {"k_cache": torch.zeros(3, 6, 2, 8).bfloat16()}, "of one type"),
    ("decode_attention", {"k_cache": torch.zeros(3, 6, 2, 8).half()}, "float32 or bfloat16"),
    ("decode_attention", {"v_cache": torch.zeros(3, 6, 1, 8).expand(3, 6, 2, 8)}, "stride"),
    ("prefill_attention", {"slot": 3}, "slot in [0, 3), got 3"),
    ("prefill_attention", {"slot": -1}, "slot in [0, 3), got -1"),
    ("prefill_attention", {"start": 5}, "start in [0, 4] for 2 rows of 6 positions, got 5"),
    ("prefill_attention", {"start": -1}, "got -1"),
    ("silu_mul", {"gate_up": torch.zeros(2, 9)}, "gate_up of shape [2, 8], got [2, 9]"),
    ("sample", {"temperature": floats(1, -0.5)}, "temperature[1] finite and at least 0"),
    ("sample", {"temperature": floats(float("nan"), 1)}, "temperature[0]"),
    ("sample", {"temperature": floats(float("inf"), 1)}, "temperature[0]"),
    ("sample", {"top_k": ints(0, -1)}, "top_k[1] at least 0, got -1"),
    ("sample", {"top_p": floats(1.5, 1)}, "top_p[0] in [0, 1]"),
    ("sample", {"min_p": floats(0, float("nan"))}, "min_p[1] in [0, 1]"),
    ("sample", {"logits": torch.zeros(2, 0)}, "a vocabulary"),
    ("sample", {"seeds": torch.zeros(3, dtype=torch.int64)}, "seeds of shape [2], got [3]"),
    ("sample", {"out": ints(7)}, "out of shape [2], got [1]"),
]


def call(ops: _native.CpuOps, name: str, values: dict[str, object]) -> object:
    operator: Callable[..., object] = getattr(ops, name)
    return operator(**values)


def test_the_good_arguments_are_good() -> None:
    ops = _native.CpuOps(1)
    for name, values in arguments(ops).items():
        call(ops, name, values)


@pytest.mark.parametrize(("name", "change", "message"), BAD)
def test_bad_arguments_are_refused_untouched(name: str, change: Change, message: str) -> None:
    ops = _native.CpuOps(1)
    values = arguments(ops)[name] | change
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    before = {key: value.clone() for key, value in tensors.items()}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as caught:
        call(ops, name, values)
    assert str(caught.value).startswith(f"[{name}] expected ")
    torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", arguments(_native.CpuOps(1)))
def test_every_array_is_checked_for_type_and_rank(name: str) -> None:
    ops = _native.CpuOps(1)
    good = arguments(ops)[name]
    for key, value in good.items():
        if not isinstance(value, Tensor):
            continue
        wrong: list[object] = [value.to(torch.complex64), value[None], [], value.to("meta")]
        for bad in wrong:
            with pytest.raises(TypeError, match=name):
                call(ops, name, good | {key: bad})


def test_results_must_not_lie_over_what_is_read() -> None:
    ops = _native.CpuOps(1)
    weight = ops.pack(torch.ones(8, 8))
    x, both = torch.zeros(2, 8), torch.zeros(2, 64)
    cache = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8)
    runs: list[Callable[[], None]] = [
        lambda: ops.linear(x, weight, x),
        lambda: ops.silu_mul(x, x[:, :4]),
        lambda: ops.add_rms_norm(x, torch.zeros(2, 8), torch.ones(8), 0.0, x),
        lambda: ops.prefill_attention(both, *cache, 0, 0, 1.0, both[:, :32]),
    ]
    for run in runs:
        with pytest.raises(ValueError, match="overlapping"):
            run()


def test_numpy_arrays_are_taken_and_read_only_ones_not_written() -> None:
    ops = _native.CpuOps(1)
    weight = ops.pack(np.ones((3, 4), np.float32))
    x, out = np.ones((2, 4), np.float32), np.zeros((2, 3), np.float32)
    x.flags.writeable = False
    ops.linear(x, weight, out)
    assert (out == 4).all()
    out.flags.writeable = False
    with pytest.raises(TypeError, match=r"\[linear\] expected out that can be written"):
        ops.linear(x, weight, out)


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_number_of_threads(num_threads: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"num_threads in [1, 1024], got {num_threads}")):
        _native.CpuOps(num_threads)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match='got "sse9"'):
        _native.CpuOps(1, isa="sse9")
