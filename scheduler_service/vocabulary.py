"""A model's tokens as llguidance sees them, and what it compiles for them within our limits."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import llguidance

from .errors import InvalidArgumentError, UnavailableError

# Tokens that a rehearsal goes along.
_NUM_STEPS = 3
# To who sets the library's limits, and places in a text of ours.
_ADVICE = re.compile(
    r"[;,] (?:either increase|try avoiding|consider making) .*| at line 1 column \d+$"
)
_TOO_MANY = re.compile(r"(?:[Pp]arser [Ee]rror: )?Current row has (\d+) items; max is (\d+)")
# The size of a stack is set for whichever thread starts next.
_STARTING = threading.Lock()

T = TypeVar("T")


class Vocabulary:
    """Tokens of text, with an end token of the library's own behind the model's."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """texts: of each token id, empty for those that are never allowed. ValueError when the
        library does not take them."""
        self.size = len(texts)
        self.text_bits = bits_of(id_ for id_, text in enumerate(texts) if text)
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=1000,
            initial_lexer_fuel=500_000,
            step_lexer_fuel=100_000,
            step_max_items=10_000,
            max_lexer_states=20_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        try:
            self._library = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Tokens([*texts, b"<end>"]))
            )
        except Exception as error:  # the library raises plain exceptions
            raise ValueError(f"no constraints with these tokens: {error}") from error

    def matcher(self, kind: str, grammar: str) -> llguidance.LLMatcher:
        """A compiled grammar, its first mask computed; InvalidArgumentError if it has none."""
        found = llguidance.LLMatcher(self._library, grammar, log_level=0, limits=self._limits)
        if found.is_error():
            raise InvalidArgumentError(kind, f"does not compile: {shortened(found.get_error())}")
        mask = int.from_bytes(found.compute_bitmask(), "little")
        if found.is_error() and not is_dead(found):
            raise InvalidArgumentError(kind, f"too complex: {shortened(found.get_error())}")
        if found.is_error() or not mask & (self.text_bits | 1 << self.size):
            raise InvalidArgumentError(kind, "no text satisfies it")
        return found

    def rehearse(self, kind: str, matcher: llguidance.LLMatcher) -> None:
        """What a request does first: copies it, and goes along a few tokens. InvalidArgumentError
        where it cannot be followed from the first token on."""
        if self._followed(matcher, 0) and (error := self._followed(matcher, 1)):
            raise InvalidArgumentError(kind, f"too complex to be followed: {shortened(error)}")

    def _followed(self, matcher: llguidance.LLMatcher, parity: int) -> str:
        """Takes the first and the last token that may follow in turn, the first one at parity 0;
        the error behind the first token, if there is one."""
        matcher = matcher.deep_copy()
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & self.text_bits
        for step in range(_NUM_STEPS):
            if not mask:
                break
            first, last = (mask & -mask).bit_length() - 1, mask.bit_length() - 1
            matcher.consume_token(last if (step + parity) % 2 else first)
            mask = int.from_bytes(matcher.compute_bitmask(), "little") & self.text_bits
            if matcher.is_error():
                return "" if step or is_dead(matcher) else matcher.get_error()
        return ""

    def to_bytes(self, bits: int) -> bytes:
        return bits.to_bytes((self.size + 7) // 8, "little")


class _Tokens:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: object) -> list[int]:
        raise RuntimeError("a grammar asked for an encoding; none needs one")


def with_stack(num_bytes: int, work: Callable[[], T]) -> T:
    """work() in a thread that has so large a stack; UnavailableError where none can be started."""
    done: Future[T] = Future()

    def call() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # as the library's panics are
            done.set_exception(error)

    thread = threading.Thread(target=call, name="grammar", daemon=True)
    with _STARTING:
        size = threading.stack_size(num_bytes)
        try:
            thread.start()
        except RuntimeError as error:
            raise UnavailableError(f"no constraint can be compiled now: {error}") from error
        finally:
            threading.stack_size(size)
    return done.result()


def bits_of(ids: Iterable[int]) -> int:
    """A number with the bits of these ids set."""
    data = bytearray()
    for id_ in ids:
        if id_ >= 8 * len(data):
            data.extend(bytes(id_ // 8 + 1 - len(data)))
        data[id_ // 8] |= 1 << id_ % 8
    return int.from_bytes(data, "little")


def is_dead(matcher: llguidance.LLMatcher) -> bool:
    """Not too complex, but without any text that could follow."""
    return "NoExtensionBias" in (matcher.stop_reason(), matcher.get_error().split("\n")[0])


def shortened(message: str) -> str:
    """Of the library's words, which may hold the whole grammar, the first and the last."""
    message = re.split(r"<state>|<backtrace>|<non-verbose", message)[0]
    message = _ADVICE.sub("", " ".join(message.split()))
    message = _TOO_MANY.sub(
        r"\1 alternatives in one place, such as optional fields; at most \2 are followed", message
    )
    return message if len(message) <= 300 else f"{message[:150]} ... {message[-140:]}"
