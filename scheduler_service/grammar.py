"""What an output must be, as masks of the tokens that may follow: llguidance behind our bounds.

The library sees the bytes that our detokenizer makes of each token, so that what a grammar matches
is the text of the answer. Tokens without text, and markup, are never allowed.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from .errors import ConstraintError, InvalidArgumentError, UnavailableError
from .generate_call import ConstraintSpec
from .json_file import ModelFilesError, is_unicode
from .json_schema import checked_schema
from .request import Mask
from .tokenizer import Tokenizer

MAX_SOURCE_BYTES = 1 << 20
# Time and memory of a regular expression grow with the square of its length.
MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_BYTES = 32_768
MAX_GRAMMAR_RULES = 500
# Intersections multiply the states of what they join.
MAX_INTERSECTIONS = 8
# A compilation that takes longer is given up. It cannot be stopped: so many may be left running.
COMPILE_SECONDS = 1.0
MAX_ABANDONED = 4
# The library recurses along chains of rules: virtual memory, of which only what is needed is used.
STACK_BYTES = 256 << 20
# Sources of the compiled grammars that are kept for the next request, in all.
CACHE_BYTES = 2 << 20

# JSON between its tokens has blanks, but no model stays among them for ever; no \u, by which a name
# could be written a second time.
_JSON_TEXT = {"whitespace_pattern": r"[ \t\n\r]{1,64}", "json_allowed_escapes": 'bfnrt\\"'}
# Off: tokens that follow of themselves would be chosen by encoding them; the model chooses.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_LARK_LITERAL = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?P<regex>(?:\\.|[^/\\\n])+)/|//[^\n]*|#[^\n]*', re.ASCII
)
# Terminals are written into each other when a grammar is read, rules are not.
_LARK_TERMINAL = re.compile(r"^[ \t]*[?!_]*[A-Z]\w*[^:\n]*:", re.MULTILINE)
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL
)
_NOT_IN_LARK = (
    (re.compile(r"%(?!ignore\b|import\b)\w*"), "this directive is not supported: {}"),
    (re.compile(r"(?m)^\s*[?!]?\w+\s*\[[^\]\n]*\]\s*:"), "attributes of rules are not: {}"),
    (re.compile(r"<"), "tokens by name or id are not supported: {}"),
    (re.compile(r"~(?!\s*\d)"), "complements are not supported: {}"),
)


class GrammarCompiler:
    """Compiles constraints for one model. Safe to use from several threads."""

    def __init__(self, tokenizer_path: Path, vocab_size: int) -> None:
        """Reads tokenizer.json; ModelFilesError when constraints cannot be had with it."""
        self._vocabulary = _Vocabulary(Tokenizer(tokenizer_path), vocab_size)
        self._cache: OrderedDict[tuple[ConstraintSpec, bool], _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._abandoned: list[threading.Thread] = []

    def compile(
        self,
        spec: ConstraintSpec,
        end_token_ids: frozenset[int],
        min_new_tokens: int,
        *,
        at_text_start: bool = False,
    ) -> GrammarConstraint:
        """Blocks, at most COMPILE_SECONDS, while other threads run; InvalidArgumentError names
        spec.kind. at_text_start: the detokenizer takes the space off the output's start, if any.
        """
        strips = at_text_start and self._vocabulary.strips
        variants = [self._compiled(spec, leading) for leading in ((False, True)[: 1 + strips])]
        with self._lock:
            matchers = [variant.matcher.deep_copy() for variant in variants]
        return GrammarConstraint(self._vocabulary, matchers, end_token_ids, min_new_tokens, spec)

    def _compiled(self, spec: ConstraintSpec, leading: bool) -> _Compiled:
        key = (spec, leading)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        grammar = _grammar(spec, self._vocabulary.strip_char if leading else "")
        matcher = self._run(spec.kind, lambda: self._vocabulary.matcher(spec.kind, grammar))
        found = _Compiled(matcher, _num_bytes(spec))
        with self._lock:
            self._cache[key] = found
            while sum(entry.num_bytes for entry in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)
        return found

    def _run(self, kind: str, work: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
        """work() in a thread with a deep stack, for COMPILE_SECONDS."""
        results: list[llguidance.LLMatcher] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised again by the caller
                errors.append(error)

        thread = threading.Thread(target=call, name="grammar", daemon=True)
        with self._lock:
            self._abandoned = [other for other in self._abandoned if other.is_alive()]
            if len(self._abandoned) >= MAX_ABANDONED:
                raise UnavailableError(
                    f"{len(self._abandoned)} constraints that took too long are still being "
                    "compiled; try again later"
                )
            size = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(size)
        thread.join(COMPILE_SECONDS)
        if thread.is_alive():
            with self._lock:
                self._abandoned.append(thread)
            raise InvalidArgumentError(
                kind, f"too complex: not compiled after {COMPILE_SECONDS:g} s; make it simpler"
            )
        if errors:
            raise errors[0]
        return results[0]


class GrammarConstraint:
    """One output that follows a grammar; a Constraint of request.py."""

    def __init__(
        self,
        vocabulary: _Vocabulary,
        matchers: list[llguidance.LLMatcher],
        end_token_ids: frozenset[int],
        min_new_tokens: int,
        spec: ConstraintSpec,
    ) -> None:
        """matchers: of the grammar and, where a space is taken off the text's start, of the grammar
        with one before it; the first token decides."""
        self._vocabulary = vocabulary
        self._matchers = matchers
        self._end_bits = _bits(id_ for id_ in end_token_ids if id_ < vocabulary.size)
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0
        self._kind = spec.kind

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
            leading = self._vocabulary.leading_bits
            texts = texts & ~leading | self._next(self._matchers[1])[0] & leading
        return texts, accepts

    def _next(self, matcher: llguidance.LLMatcher) -> tuple[int, bool]:
        if matcher.is_error() and _is_dead(matcher):
            return 0, False
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not matcher.is_error():
            return mask & self._vocabulary.text_bits, bool(mask >> self._vocabulary.size & 1)
        if _is_dead(matcher):
            return 0, False
        raise self._too_complex(matcher)

    def _consume(self, token_id: int) -> None:
        if not self._vocabulary.text_bits & ~self._end_bits & _bits([token_id]):
            raise ValueError(f"token {token_id} is no text; no mask of {self._kind} allows it")
        if len(self._matchers) > 1:
            leads = bool(self._vocabulary.leading_bits & _bits([token_id]))
            self._matchers = [self._matchers[leads]]
        (matcher,) = self._matchers
        if matcher.validate_tokens([token_id]) != 1 and not matcher.is_error():
            raise ValueError(f"token {token_id} was not allowed by the last mask of {self._kind}")
        if not matcher.consume_token(token_id) and not _is_dead(matcher):
            raise self._too_complex(matcher)
        self._num_tokens += 1

    def _too_complex(self, matcher: llguidance.LLMatcher) -> ConstraintError:
        return ConstraintError(
            f"{self._kind}: too complex to be followed after {self._num_tokens} tokens: "
            f"{_shortened(matcher.get_error())}"
        )


class _Compiled:
    """A matcher at its start, to be copied, never advanced; num_bytes of its source."""

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self.matcher = matcher
        self.num_bytes = num_bytes


class _Vocabulary:
    """Tokens as the library sees them, with an end token of its own behind the model's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        tokens = tokenizer.tokens
        if tokens.strip_count > 1:
            raise ModelFilesError(
                f"tokenizer.json: the decoder takes {tokens.strip_count} characters off a text's "
                "start; constraints are supported with at most one"
            )
        markup = {tokenizer.token_id(text) for text in tokenizer.control_texts}
        texts = [b"" if id_ in markup else tokens.get(id_) for id_ in range(vocab_size)]
        self.size = vocab_size
        self.strips = bool(tokens.strip_count)
        self.strip_char = tokens.strip_char
        self.text_bits = _bits(id_ for id_, text in enumerate(texts) if text)
        first = tokens.strip_char.encode()
        self.leading_bits = _bits(id_ for id_, text in enumerate(texts) if text.startswith(first))
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
            raise ModelFilesError(f"tokenizer.json: no constraints with it: {error}") from error

    def matcher(self, kind: str, grammar: str) -> llguidance.LLMatcher:
        """A compiled grammar, its first mask computed; InvalidArgumentError if it has none."""
        found = llguidance.LLMatcher(self._library, grammar, log_level=0, limits=self._limits)
        if found.is_error():
            raise InvalidArgumentError(kind, f"does not compile: {_shortened(found.get_error())}")
        mask = int.from_bytes(found.compute_bitmask(), "little")
        if found.is_error() and not _is_dead(found):
            raise InvalidArgumentError(kind, f"too complex: {_shortened(found.get_error())}")
        if found.is_error() or not mask & (self.text_bits | 1 << self.size):
            raise InvalidArgumentError(kind, "no text satisfies it")
        return found

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


def _bits(ids: Iterable[int]) -> int:
    data = bytearray()
    for id_ in ids:
        if id_ >= 8 * len(data):
            data.extend(bytes(id_ // 8 + 1 - len(data)))
        data[id_ // 8] |= 1 << id_ % 8
    return int.from_bytes(data, "little")


def _is_dead(matcher: llguidance.LLMatcher) -> bool:
    """Not too complex, but without any text that could follow."""
    return "NoExtensionBias" in (matcher.stop_reason(), matcher.get_error().split("\n")[0])


def _num_bytes(spec: ConstraintSpec) -> int:
    # At least some: even short sources compile to something.
    return 1024 + sum(len(text.encode(errors="replace")) for text in (spec.source, *spec.choices))


def _grammar(spec: ConstraintSpec, leading: str) -> str:
    """The library's form of a constraint, after the text `leading`."""
    if not all(map(is_unicode, (spec.source, *spec.choices))):
        raise InvalidArgumentError(spec.kind, "holds half of a surrogate pair, which is no text")
    _check_size(spec.kind, _num_bytes(spec) - 1024, MAX_SOURCE_BYTES, "bytes")
    match spec.kind:
        case "json_schema":
            body: dict[str, Any] = {"json_schema": _schema(spec.source)}
        case "json_object":
            body = {"json_schema": {"type": "object", "x-guidance": _JSON_TEXT}}
        case "regex":
            _check_size("regex", len(spec.source), MAX_REGEX_CHARS, "characters")
            regex = llguidance.LLMatcher.grammar_from_regex(spec.source)
            body = {"lark_grammar": json.loads(regex)["grammars"][0]["lark_grammar"]}
        case "grammar":
            body = {"lark_grammar": _lark(spec.source)}
        case "choice" if spec.choices:
            texts = "|".join(json.dumps(t).replace("\x7f", "\\u007f") for t in spec.choices)
            body = {"lark_grammar": f"start: TEXT\nTEXT: {texts}"}
        case _:
            raise InvalidArgumentError(spec.kind, "asks for nothing that is known")
    first = f"{json.dumps(leading)} @body" if leading else "@body"
    top = {"lark_grammar": f"{_OPTIONS}start: {first}"}
    return json.dumps({"grammars": [top, {"name": "body", **body}]})


def _check_size(kind: str, size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise InvalidArgumentError(kind, f"{size} {unit} are too many; at most {limit} are taken")


def _schema(source: str) -> dict[str, Any]:
    return {**checked_schema(source), "x-guidance": _JSON_TEXT}


def _lark(source: str) -> str:
    """A grammar in Lark's form, of whichever form it is; refused where it has what is not bounded
    or not about text."""
    _check_size("grammar", len(source.encode()), MAX_GRAMMAR_BYTES, "bytes")
    num_rules = len(_GBNF_RULE.findall(source))
    if num_rules:
        _check_size("grammar", num_rules, MAX_GRAMMAR_RULES, "rules")
        source = _from_gbnf(source)
    for literal in _LARK_LITERAL.finditer(source):
        _check_size("grammar", len(literal["regex"] or ""), MAX_REGEX_CHARS, "characters a regex")
    bare = _LARK_LITERAL.sub(" ", source)
    _check_size("grammar", len(_LARK_TERMINAL.findall(bare)), MAX_GRAMMAR_RULES, "terminals")
    for pattern, message in _NOT_IN_LARK:
        if found := pattern.search(bare):
            raise InvalidArgumentError("grammar", message.format(repr(found[0].strip()[:60])))
    _check_size("grammar", bare.count("&"), MAX_INTERSECTIONS, "intersections")
    return source


def _from_gbnf(source: str) -> str:
    try:
        lark = gbnf_to_lark(_GBNF_ESCAPE.sub(_plain, source))
    except RecursionError:
        raise InvalidArgumentError("grammar", "is nested too deeply") from None
    except Exception as error:  # the converter raises plain exceptions
        raise InvalidArgumentError("grammar", f"is no GBNF: {_shortened(str(error))}") from error
    return lark.removeprefix("%llguidance {}")


def _plain(escape: re.Match[str]) -> str:
    """An escape of GBNF as the converter gets it right: \\xHH below 128, else the character."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise InvalidArgumentError("grammar", f"{escape[0]} is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _shortened(message: str) -> str:
    """Of the library's words, which may hold the whole grammar, the first and the last."""
    message = re.split(r"<state>|<backtrace>|<non-verbose", message)[0]
    message = " ".join(message.split())
    return message if len(message) <= 300 else f"{message[:150]} ... {message[-140:]}"
