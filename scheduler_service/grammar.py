"""What an output must be, as masks of the tokens that may follow: llguidance behind our bounds.

The library sees the bytes that our detokenizer makes of each token, so that what a grammar matches
is the text of the answer. Tokens without text, and markup, are never allowed.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import llguidance

from .errors import ConstraintError, InvalidArgumentError, UnavailableError
from .generate_call import ConstraintSpec
from .grammar_text import grammar_text, num_bytes
from .grammar_trial import COMMAND, STACK_BYTES, GrammarTrial, OutOfTimeError
from .json_file import ModelFilesError
from .request import Mask
from .tokenizer import Tokenizer
from .vocabulary import Vocabulary, bits_of, is_dead, shortened, with_stack

# Of a processor, that a compilation takes at most, and that most never take.
COMPILE_SECONDS = 1.0
QUICK_SECONDS = 0.02
# Compiled grammars that are kept for the next request. Followed, each may grow by some MB.
MAX_KEPT = 64
# Their sources, in all; as much of those of refused ones.
CACHE_BYTES = 2 << 20
# They themselves, in all.
KEPT_BYTES = 256 << 20
# With those that are no longer kept, but that requests follow.
IN_USE_BYTES = 1 << 30
# There is always room for one as small: the large ones hold up each other.
SMALL_BYTES = 4 << 20
# As a source counts, besides its own bytes.
ENTRY_BYTES = 1 << 10

T = TypeVar("T")


class GrammarCompiler:
    """Compiles constraints for one model, each after its trial. Safe to use from several threads.

    Quick and slow ones have a process for trials each, so that quick ones never wait for slow.
    """

    def __init__(
        self, tokenizer_path: Path, vocab_size: int, command: Sequence[str] = COMMAND
    ) -> None:
        """Reads tokenizer.json; ModelFilesError when constraints cannot be had with it."""
        tokenizer = Tokenizer(tokenizer_path)
        texts = _texts(tokenizer, vocab_size)
        try:
            self._vocabulary = Vocabulary(texts)
        except ValueError as error:
            raise ModelFilesError(f"tokenizer.json: {error}") from error
        tokens = tokenizer.tokens
        self._blank = tokens.strip_char if tokens.strip_count else ""
        first = tokens.strip_char.encode()
        self._leading_bits = bits_of(i for i, text in enumerate(texts) if text.startswith(first))
        self._quick = GrammarTrial(texts, command)
        self._slow = GrammarTrial(texts, command)
        self._compiled = _Cache[Grammar](MAX_KEPT)
        self._refused = _Cache[InvalidArgumentError](CACHE_BYTES // ENTRY_BYTES)
        self._in_use = weakref.WeakSet[Grammar]()
        self._in_use_lock = threading.Lock()

    def find(self, spec: ConstraintSpec, *, at_text_start: bool = False) -> Grammar | None:
        """What was compiled before, at once; InvalidArgumentError when it was refused before."""
        key = (spec, at_text_start and bool(self._blank))
        if refusal := self._refused.get(key):
            raise InvalidArgumentError(refusal.field, refusal.description)
        found = self._compiled.get(key)
        return None if found is None or found.is_spent else found

    def compile(
        self, spec: ConstraintSpec, *, at_text_start: bool = False, is_slow: bool = True
    ) -> Grammar:
        """Blocks, while other threads run, for some times COMPILE_SECONDS at most, or
        QUICK_SECONDS and OutOfTimeError unless is_slow. What is known is found.

        at_text_start: the detokenizer takes the space off the output's start, if any.
        InvalidArgumentError names spec.kind; UnavailableError as of GrammarTrial, and where what
        requests follow leaves no memory for it.
        """
        if found := self.find(spec, at_text_start=at_text_start):
            return found
        leading = ["", self._blank] if at_text_start and self._blank else [""]
        key = (spec, len(leading) > 1)
        try:
            num_bytes = self._try(spec, leading, is_slow)
        except InvalidArgumentError as error:
            # A new one: this one's traceback holds the whole request.
            self._refused.put(key, InvalidArgumentError(error.field, error.description))
            raise
        self._make_room(num_bytes)

        def compiled() -> list[llguidance.LLMatcher]:
            texts = (grammar_text(spec, each) for each in leading)
            return [self._vocabulary.matcher(spec.kind, text) for text in texts]

        # More than it had in its trial.
        matchers = with_stack(2 * STACK_BYTES, compiled)
        grammar = Grammar(self._vocabulary, matchers, self._leading_bits, spec.kind, num_bytes)
        with self._in_use_lock:
            self._in_use.add(grammar)
        self._compiled.put(key, grammar, num_bytes)
        return grammar

    def stop(self) -> None:
        """Nothing new is tried any more. Does not block."""
        self._quick.stop()
        self._slow.stop()

    def close(self) -> None:
        """Ends the processes for trials."""
        self._quick.close()
        self._slow.close()

    def _make_room(self, num_bytes: int) -> None:
        self._compiled.drop_to(KEPT_BYTES - num_bytes)
        with self._in_use_lock:
            in_use = sum(grammar.num_bytes for grammar in self._in_use)
        if num_bytes > SMALL_BYTES and in_use + num_bytes > IN_USE_BYTES:
            raise UnavailableError(
                f"this constraint takes {num_bytes >> 20} MiB of memory, those of other requests "
                f"{in_use >> 20}; {IN_USE_BYTES >> 20} are taken in all; try again later"
            )

    def _try(self, spec: ConstraintSpec, leading: Sequence[str], is_slow: bool) -> int:
        if not is_slow:
            return self._quick.run(spec, leading, QUICK_SECONDS)
        try:
            return self._slow.run(spec, leading, COMPILE_SECONDS)
        except OutOfTimeError:
            raise InvalidArgumentError(
                spec.kind, f"too complex: not compiled after {COMPILE_SECONDS:g} s; make it simpler"
            ) from None


class Grammar:
    """A compiled constraint: matchers at their start, to be copied, never advanced.

    Copies share what the library learns of the text's words; where this breaks its bounds for one,
    it does for all, and the grammar `is_spent`: to be compiled anew.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matchers: list[llguidance.LLMatcher],
        leading_bits: int,
        kind: str,
        num_bytes: int,
    ) -> None:
        """matchers: of the grammar and, where a space is taken off the text's start, of the grammar
        with one before it; the first token decides: leading_bits are of those that begin with it.
        num_bytes: of memory, that they take.
        """
        self.vocabulary = vocabulary
        self.leading_bits = leading_bits
        self.kind = kind
        self.num_bytes = num_bytes
        self.is_spent = False
        self._matchers = matchers
        self._lock = threading.Lock()

    def constraint(self, end_token_ids: frozenset[int], min_new_tokens: int) -> GrammarConstraint:
        """For one output."""
        with self._lock:
            matchers = [matcher.deep_copy() for matcher in self._matchers]
        return GrammarConstraint(self, matchers, end_token_ids, min_new_tokens)


class GrammarConstraint:
    """One output that follows a grammar; a Constraint of request.py."""

    def __init__(
        self,
        grammar: Grammar,
        matchers: list[llguidance.LLMatcher],
        end_token_ids: frozenset[int],
        min_new_tokens: int,
    ) -> None:
        """matchers: copies of the grammar's."""
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matchers = matchers
        self._leading_bits = grammar.leading_bits
        self._end_bits = bits_of(id_ for id_ in end_token_ids if id_ < grammar.vocabulary.size)
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0
        self._kind = grammar.kind

    def advance(self, token_ids: Sequence[int]) -> Mask:
        """ValueError for a token that the last mask did not allow; ConstraintError when the grammar
        is too complex to be followed further."""
        for token_id in token_ids:
            self._consume(token_id)
        texts, accepts = self._allowed()
        allowed = texts & ~self._end_bits
        if accepts and self._num_tokens >= self._min_new_tokens:
            allowed |= self._end_bits
        return Mask(self._vocabulary.to_bytes(allowed) if allowed else None, accepts)

    def _allowed(self) -> tuple[int, bool]:
        """Bits of the tokens with text that may follow, and whether the text may end here."""
        texts, accepts = self._next(self._matchers[0])
        if len(self._matchers) > 1:
            leading = self._next(self._matchers[1])[0] & self._leading_bits
            texts = texts & ~self._leading_bits | leading
        return texts, accepts

    def _next(self, matcher: llguidance.LLMatcher) -> tuple[int, bool]:
        if matcher.is_error() and is_dead(matcher):
            return 0, False
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not matcher.is_error():
            return mask & self._vocabulary.text_bits, bool(mask >> self._vocabulary.size & 1)
        if is_dead(matcher):
            return 0, False
        raise self._too_complex(matcher)

    def _consume(self, token_id: int) -> None:
        if not self._vocabulary.text_bits & ~self._end_bits & bits_of([token_id]):
            raise ValueError(f"token {token_id} is no text; no mask of {self._kind} allows it")
        if len(self._matchers) > 1:
            leads = bool(self._leading_bits & bits_of([token_id]))
            self._matchers = [self._matchers[leads]]
        (matcher,) = self._matchers
        if matcher.validate_tokens([token_id]) != 1 and not matcher.is_error():
            # It was, if another output broke what they share since then.
            matcher.compute_bitmask()
            if matcher.is_error() and not is_dead(matcher):
                raise self._too_complex(matcher)
            raise ValueError(f"token {token_id} was not allowed by the last mask of {self._kind}")
        if not matcher.consume_token(token_id) and not is_dead(matcher):
            raise self._too_complex(matcher)
        self._num_tokens += 1

    def _too_complex(self, matcher: llguidance.LLMatcher) -> ConstraintError:
        self._grammar.is_spent = True
        return ConstraintError(
            f"{self._kind}: too complex to be followed after {self._num_tokens} tokens: "
            f"{shortened(matcher.get_error())}"
        )


class _Cache(Generic[T]):
    """The last used ones, by constraint and whether it begins a text; CACHE_BYTES of sources."""

    def __init__(self, most: int) -> None:
        self._most = most
        # With the bytes that each takes.
        self._entries: OrderedDict[tuple[ConstraintSpec, bool], tuple[T, int]] = OrderedDict()
        self._source_bytes = 0
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[ConstraintSpec, bool]) -> T | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: tuple[ConstraintSpec, bool], value: T, num_bytes: int = 0) -> None:
        with self._lock:
            if key in self._entries:
                self._drop(key)
            self._entries[key] = value, num_bytes
            self._source_bytes += _size(key)
            self._num_bytes += num_bytes
            while self._source_bytes > CACHE_BYTES or len(self._entries) > self._most:
                self._drop(next(iter(self._entries)))

    def drop_to(self, num_bytes: int) -> None:
        """Drops the oldest ones until no more than so many bytes are taken."""
        with self._lock:
            while self._entries and self._num_bytes > num_bytes:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[ConstraintSpec, bool]) -> None:
        _, num_bytes = self._entries.pop(key)
        self._source_bytes -= _size(key)
        self._num_bytes -= num_bytes


def _size(key: tuple[ConstraintSpec, bool]) -> int:
    return ENTRY_BYTES + num_bytes(key[0])


def _texts(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Of each token id, as our detokenizer makes it; empty where it is markup, or there is none."""
    tokens = tokenizer.tokens
    if tokens.strip_count > 1:
        raise ModelFilesError(
            f"tokenizer.json: the decoder takes {tokens.strip_count} characters off a text's "
            "start; constraints are supported with at most one"
        )
    markup = {tokenizer.token_id(text) for text in tokenizer.control_texts}
    return [b"" if id_ in markup else tokens.get(id_) for id_ in range(vocab_size)]
