"""The slot table: N fixed seats, owned by the scheduler and by nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# The engine's warm-up step takes a slot under this generation; tenants get higher ones.
WARM_UP_GENERATION = 1


@dataclass(slots=True)
class Slot:
    """One seat. `generation` rises each time it is taken; `released_at` orders releases."""

    index: int
    generation: int = WARM_UP_GENERATION
    request_id: str | None = None
    released_at: int = 0


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as it is now. `state` is "free", "prefill" or "decode"; request_id None when free."""

    index: int
    generation: int
    state: str
    request_id: str | None
    # Tokens computed (confirmed by results), of the prompt and generated.
    num_computed_tokens: int
    num_prompt_tokens: int
    num_generated_tokens: int


class SlotTable:
    """Hands out slots: the least recently used free one, of equals the lowest index."""

    def __init__(self, num_slots: int) -> None:
        """ValueError for fewer than one slot."""
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; at least 1 slot is needed")
        self._slots = [Slot(index) for index in range(num_slots)]
        self._num_releases = 0
        self._num_free = num_slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, request_id: str) -> Slot:
        """A free slot under a new generation. LookupError when all are busy."""
        free = [slot for slot in self._slots if slot.request_id is None]
        if not free:
            raise LookupError(f"all {len(self)} slots are busy")
        slot = min(free, key=lambda slot: (slot.released_at, slot.index))
        slot.request_id = request_id
        slot.generation += 1
        self._num_free -= 1
        return slot

    def renew(self, index: int) -> Slot:
        """A new generation for the slot's tenant. ValueError when it has none."""
        slot = self._busy(index)
        slot.generation += 1
        return slot

    def release(self, index: int) -> None:
        """Frees a slot. ValueError when it is free."""
        slot = self._busy(index)
        self._num_releases += 1
        slot.released_at = self._num_releases
        slot.request_id = None
        self._num_free += 1

    def _busy(self, index: int) -> Slot:
        slot = self._slots[index]
        if slot.request_id is None:
            raise ValueError(f"slot {index} is free")
        return slot
