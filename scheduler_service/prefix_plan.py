"""How seats use the prefix cache: what they wait for, take over and leave behind."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

from .limits import PrefixCacheCounters
from .prefix_index import NO_MATCH, Kept, Match, PrefixIndex, PrefixReuse, common_length
from .request import Request
from .seat import Seat
from .step import PrefillChunk, Prefix

# A copy's launches cost about what a chunk costs whose rows fit the tile of 16 that a step's
# products compute anyway.
MIN_COPY = 16
# Tokens saved for which a prompt waits at least one command.
MIN_WAIT = 32

_NOTHING: array[int] = array("I")


class PrefixPlan:
    """Finds prefixes for seats. The index changes only by `note_chunk` and the `forget`s, so all
    that a command plans sees what the commands before it have written."""

    def __init__(self, num_slots: int, reuse: PrefixReuse, counters: PrefixCacheCounters) -> None:
        self.index = PrefixIndex(reuse)
        self._num_slots = num_slots
        self._counters = counters

    def choose_slot(self, free: Sequence[int], request: Request) -> int:
        """Of the free slots, least recently used first, the one for a request."""
        wanted = self._wanted(request, request.known_token_ids())
        return self.index.choose(free, wanted, request.cache_salt)

    def num_reusable(self, request: Request, seats: Iterable[Seat]) -> int:
        """Tokens that a waiting request may find in the cache, at most: what is there, and what
        `seats` are about to write."""
        wanted = self._wanted(request, request.known_token_ids())
        salt = request.cache_salt
        found = self.index.longest(range(self._num_slots), wanted, salt) or NO_MATCH
        coming = (
            common_length(seat.prefill_token_ids, wanted)
            for seat in seats
            if seat.num_prefill_left and seat.request.cache_salt == salt
        )
        return max(found.length, max(coming, default=0))

    def join(self, seat: Seat, earlier: Iterable[Seat]) -> None:
        """A seat that is to start. `earlier`: those admitted before it, in order."""
        seat.wanted = self._wanted(seat.request, seat.prefill_token_ids)
        seat.ahead = list(self._ahead(seat, earlier))
        # With nobody ahead `must_wait` looks by itself.
        seat.found = self._find(seat, ()) if seat.ahead else NO_MATCH

    def _wanted(self, request: Request, known: array[int]) -> array[int]:
        """The tokens that may be taken over: never the last one, whose logits are wanted."""
        if self.index.reuse is PrefixReuse.NONE or request.num_prompt_logprobs is not None:
            return _NOTHING
        return known[:-1]

    def _ahead(self, seat: Seat, earlier: Iterable[Seat]) -> Iterable[tuple[Seat, int]]:
        """Seats in prefill that will write tokens of this one's, and how many."""
        for other in reversed(list(earlier)):
            if not other.num_prefill_left or other.request.cache_salt != seat.request.cache_salt:
                continue
            length = seat.shared_with(other)
            if length >= MIN_WAIT:
                yield other, length
            if not other.is_started and length == len(seat.wanted) == len(other.wanted):
                # An equal prompt: of those before it the same is true, they need no comparison.
                yield from other.ahead
                return

    def must_wait(self, seat: Seat, live: Mapping[int, Seat]) -> bool:
        """Whether a seat that has not started waits for one before it, which will soon have written
        more of its tokens than can be found now. The oldest in prefill never does.

        `live`: all seats by slot. Else `found` is up to date.
        """
        soon, sent = 0, 0
        for other, length in seat.ahead:
            is_live = live.get(other.slot) is other
            if is_live and other.num_prefill_left and self._is_kept(other):
                soon = max(soon, length)
                sent = max(sent, min(length, other.num_prefill_planned))
        # A look at all slots is saved as long as what was seen at the last one is enough to wait.
        if soon >= max(sent, seat.found.length) + MIN_WAIT:
            return True
        seat.found = self._find(seat, ())
        return soon >= seat.found.length + MIN_WAIT

    def must_let_pass(self, seat: Seat, taken: Mapping[int, Seat]) -> bool:
        """Whether seats before it in the command being planned take the slot of what it would find,
        and hold more of its tokens once that is sent. `taken`: those that start in it, by slot."""
        ahead = [(one, length) for one, length in seat.ahead if taken.get(one.slot) is one]
        if not ahead:
            return False
        soon = max(min(length, other.num_prefill_planned) for other, length in ahead)
        return soon >= self._find(seat, taken).length + MIN_WAIT

    def _is_kept(self, seat: Seat) -> bool:
        """What this seat writes can be found; not so after a flush."""
        return not seat.is_started or self.index.holds(seat.slot, seat.generation)

    def take(self, seat: Seat, taken: Collection[int]) -> Prefix | None:
        """The prefix of a seat that starts, about which `must_wait` was asked for this command.

        `taken`: slots that start in it before this one, whose tokens are lost by then.
        """
        found = self._find(seat, taken) if seat.found.slot in taken else seat.found
        seat.ahead = []
        if not found.length:
            return None
        kept = self.index.kept(found.slot)
        assert kept is not None
        return Prefix(found.slot, kept.generation, found.length)

    def _find(self, seat: Seat, taken: Collection[int]) -> Match:
        salt = seat.request.cache_salt
        own = Match(seat.slot, self.index.length_in(seat.slot, seat.wanted, salt))
        others = (slot for slot in range(self._num_slots) if slot not in taken)
        above = own.length + MIN_COPY - 1
        return self.index.longest(others, seat.wanted, salt, above) or own

    def note_chunk(self, seat: Seat, chunk: PrefillChunk) -> None:
        """The chunk's command is planned whole, and will be sent."""
        token_ids = seat.prefill_token_ids
        end = chunk.start + len(chunk.token_ids)
        if chunk.setup is None:
            self.index.extend(seat.slot, seat.generation, token_ids[chunk.start : end])
            return
        self._count(seat, chunk.prefix)
        request = seat.request
        num_prompt_tokens = len(request.prompt_token_ids)
        kept = Kept(seat.generation, request.cache_salt, num_prompt_tokens, token_ids[:end])
        self.index.begin(seat.slot, kept)

    def note_tokens(self, seat: Seat) -> None:
        """Results brought tokens: all but the last one known are written."""
        kept = self.index.kept(seat.slot)
        if kept is None or self.index.reuse is not PrefixReuse.ALL:
            return
        request = seat.request
        first = len(kept.token_ids) - len(request.prompt_token_ids)
        self.index.extend(seat.slot, seat.generation, request.generated_token_ids[first:-1])

    def _count(self, seat: Seat, prefix: Prefix | None) -> None:
        """At a request's first start only; a rebuild is no business of its caller."""
        counters, request = self._counters, seat.request
        if prefix is not None and prefix.source_slot == seat.slot:
            shared = prefix.length
        else:
            shared = self.index.length_in(seat.slot, seat.wanted, request.cache_salt)
        num_lost = self.index.num_tokens(seat.slot) - shared
        counters.num_evictions += num_lost > 0
        counters.num_evicted_tokens += num_lost
        if request.is_placed:
            return
        request.is_placed = True
        counters.num_queried_tokens += len(request.prompt_token_ids)
        if prefix is None:
            return
        # Of a request that goes on, tokens of its own may be found too.
        request.num_cached_tokens = min(prefix.length, len(request.prompt_token_ids))
        counters.num_hits += 1
        counters.num_hit_tokens += request.num_cached_tokens
        if prefix.source_slot != seat.slot:
            counters.num_copies += 1
            counters.num_copied_tokens += prefix.length
