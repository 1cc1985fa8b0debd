"""What the slots' positions hold, and which of it a prompt shares.

Exact: token by token. A slot keeps its tokens after its tenant has gone, until its next tenant's
first chunk is sent.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A prompt goes on where another one ended if it leaves out at most so many of that one's tokens: a
# template may open the assistant's turn with more than it repeats (Qwen3: an empty thought of four
# tokens). The end of another user's message is further from the end than that.
_MAX_TAIL = 4


class PrefixReuse(enum.Enum):
    """Which positions may be reused; see PrefixReuse of worker.proto."""

    NONE = "none"
    PREFILL = "prompts"
    ALL = "all"


def common_length(first: array[int], second: array[int]) -> int:
    """Tokens that both begin with. Slices compare at the speed of memory, and grow while equal."""
    done, size, end = 0, 16, min(len(first), len(second))
    while done < end:
        stop = min(done + size, end)
        if first[done:stop] != second[done:stop]:
            break
        done, size = stop, 4 * size
    else:
        return end
    # [0, done) is equal, [done, stop) is not.
    while stop - done > 1:
        middle = (done + stop) // 2
        if first[done:middle] == second[done:middle]:
            done = middle
        else:
            stop = middle
    return done


@dataclass(slots=True)
class Kept:
    """What a slot's first positions hold, of its present tenant or of its last one.

    All of it is written by commands that are sent, as far as they and results surely say.
    """

    generation: int
    salt: str
    num_prompt_tokens: int
    token_ids: array[int]


class Match(NamedTuple):
    """The first `length` positions of `slot` are a prompt's."""

    slot: int
    length: int


NO_MATCH = Match(-1, 0)


class PrefixIndex:
    """The tokens of every slot. With PrefixReuse.NONE it stays empty."""

    def __init__(self, reuse: PrefixReuse) -> None:
        self.reuse = reuse
        self._kept: dict[int, Kept] = {}

    def kept(self, slot: int) -> Kept | None:
        return self._kept.get(slot)

    def num_tokens(self, slot: int) -> int:
        kept = self._kept.get(slot)
        return 0 if kept is None else len(kept.token_ids)

    def holds(self, slot: int, generation: int) -> bool:
        """The slot's tokens are those of this tenant."""
        kept = self._kept.get(slot)
        return kept is not None and kept.generation == generation

    def begin(self, slot: int, kept: Kept) -> None:
        """A tenant's first chunk is sent: what the slot held is lost."""
        if self.reuse is not PrefixReuse.NONE:
            self._kept[slot] = kept

    def extend(self, slot: int, generation: int, token_ids: Sequence[int]) -> None:
        """More positions of this tenant are written; nothing if its first ones were forgotten."""
        kept = self._kept.get(slot)
        if kept is not None and kept.generation == generation:
            kept.token_ids.extend(token_ids)

    def forget(self, slot: int) -> None:
        self._kept.pop(slot, None)

    def forget_all(self) -> None:
        self._kept.clear()

    def length_in(self, slot: int, prompt: array[int], salt: str) -> int:
        """Tokens that the prompt and the slot begin with."""
        kept = self._kept.get(slot)
        if kept is None or kept.salt != salt:
            return 0
        return common_length(kept.token_ids, prompt)

    def longest(
        self, slots: Iterable[int], prompt: array[int], salt: str, above: int = 0
    ) -> Match | None:
        """The slot that has most of the prompt's beginning, and more than `above` tokens of it; the
        first one named of equals."""
        best = None
        for slot in slots:
            if above >= len(prompt):
                break
            kept = self._kept.get(slot)
            if kept is None or kept.salt != salt or len(kept.token_ids) <= above:
                continue
            # Most slots end here: to be better it must hold this token too.
            if kept.token_ids[above] != prompt[above]:
                continue
            length = common_length(kept.token_ids, prompt)
            if length > above:
                best, above = Match(slot, length), length
        return best

    def choose(self, free: Sequence[int], prompt: array[int], salt: str) -> int:
        """Of the free slots, least recently used first, the one that the prompt shall have.

        One whose last prompt this one goes on with, for nobody else will want the rest of it. Else
        one that holds nothing or was not used for longest, so that no conversation loses its own
        for the sake of a beginning that many share; what is shared can be copied.
        """
        best = self.longest(free, prompt, salt)
        if best is not None and self._goes_on(best):
            return best.slot
        return min(free, key=lambda slot: slot in self._kept)

    def _goes_on(self, match: Match) -> bool:
        kept = self._kept[match.slot]
        length = min(kept.num_prompt_tokens, len(kept.token_ids))
        return match.length >= length - min(_MAX_TAIL, length // 2)
