"""A slot table on the GPU with arrays that a test can set and read. R rows, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from worker import _native

# Of `scheduled`: in the next step alone, and in all to come.
ONCE, ALWAYS = 1, 2
NAMES = ["last_token", "length", "active", "scheduled", "row_token", "row_position", "max_len"]


class DeviceSlots:
    """Greedy rows that are neither active nor scheduled; arrays under the table's names."""

    def __init__(self, num_rows: int, vocab: int, ring_rows: int = 4) -> None:
        ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        self.arrays = {name: torch.zeros(num_rows, **ints) for name in NAMES}
        self.arrays["max_len"].fill_(1 << 30)
        self.arrays |= {
            "end_ids": torch.zeros(num_rows, (vocab + 31) // 32, **ints),
            "temperature": torch.zeros(num_rows, device="cuda"),
            "top_k": torch.zeros(num_rows, **ints),
            "top_p": torch.ones(num_rows, device="cuda"),
            "min_p": torch.zeros(num_rows, device="cuda"),
            "seed": torch.zeros(num_rows, dtype=torch.int64, device="cuda"),
            "counter": torch.zeros(1, **ints),
        }
        self.ring = torch.full((ring_rows, num_rows), -77, dtype=torch.int32, pin_memory=True)
        self.stamps = torch.zeros(ring_rows, 2, dtype=torch.int64, pin_memory=True)
        self.table = _native.SlotTable(
            vocab=vocab,
            ring=self.ring.data_ptr(),
            stamps=self.stamps.data_ptr(),
            ring_rows=ring_rows,
            **self.arrays,
        )
        self._workspace: Tensor | None = None

    def put(self, **values: list[int] | list[float]) -> None:
        for name, value in values.items():
            self.arrays[name].copy_(torch.tensor(value, dtype=self.arrays[name].dtype))

    def get(self, name: str) -> list[int]:
        return list(self.arrays[name].tolist())

    def set_end_ids(self, row: int, ids: set[int]) -> None:
        words = [0] * self.arrays["end_ids"].shape[1]
        for one in ids:
            words[one // 32] |= 1 << one % 32
        signed = [word - (1 << 32) if word >> 31 else word for word in words]
        self.arrays["end_ids"][row] = torch.tensor(signed, dtype=torch.int32)

    def workspace(self, ops: _native.CudaOps, num_rows: int) -> Tensor:
        """Zeros when it is made, then as `sample` left it."""
        size = ops.sample_workspace(num_rows, 0)
        if self._workspace is None or self._workspace.shape[0] < size:
            self._workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        return self._workspace

    def sample(
        self, ops: _native.CudaOps, logits: Tensor, rows: list[int] | None = None
    ) -> list[int]:
        """The step's row of the ring."""
        at = int(self.arrays["counter"].item()) % len(self.ring)
        chosen = None if rows is None else torch.tensor(rows, dtype=torch.int32, device="cuda")
        ops.sample(self.table, logits, chosen, self.workspace(ops, logits.shape[0]))
        torch.cuda.synchronize()
        return list(self.ring[at].tolist())
