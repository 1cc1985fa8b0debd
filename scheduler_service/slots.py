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
    # The tenant's row among those that decode; -1 when free.
    decode_row: int = -1


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as it is now. `state` is "free", "prefill" or "decode".

    `request_id`: the call's, None when free; choice_index says which of its answers.
    """

    index: int
    generation: int
    state: str
    request_id: str | None
    # Tokens in place (confirmed by results), of the prompt and generated.
    num_computed_tokens: int
    num_prompt_tokens: int
    num_generated_tokens: int
    # Tokens of a free slot that a new request can reuse.
    num_cached_tokens: int = 0
    choice_index: int = 0


class SlotTable:
    """Which slots are free, and which of max_running decode rows."""

    def __init__(self, num_slots: int, max_running: int) -> None:
        """ValueError for fewer than one slot, and for max_running outside of 1 to num_slots."""
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; at least 1 slot is needed")
        if not 1 <= max_running <= num_slots:
            raise ValueError(f"max_running is {max_running}; 1 to {num_slots} is accepted")
        self.max_running = max_running
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

    @property
    def num_spare(self) -> int:
        """Requests that may be seated now."""
        return self.max_running - (len(self) - self._num_free)

    def free(self) -> list[int]:
        """Free slots, the least recently used one first, of equals the lowest index."""
        free = [slot for slot in self._slots if slot.request_id is None]
        free.sort(key=lambda slot: slot.released_at)
        return [slot.index for slot in free]

    def take(self, index: int, request_id: str) -> Slot:
        """A free slot, under a new generation and with the lowest free decode row.

        LookupError when it is busy, or as many as may be.
        """
        slot = self._slots[index]
        if slot.request_id is not None:
            raise LookupError(f"slot {index} is busy")
        if not self.num_spare:
            raise LookupError(f"{self.max_running} slots are busy, no more may be")
        used = {other.decode_row for other in self._slots}
        slot.decode_row = min(row for row in range(self.max_running) if row not in used)
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
        slot.decode_row = -1
        self._num_free += 1

    def _busy(self, index: int) -> Slot:
        slot = self._slots[index]
        if slot.request_id is None:
            raise ValueError(f"slot {index} is free")
        return slot
