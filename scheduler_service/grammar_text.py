"""A constraint in the form that llguidance reads, or refused: what it must not be given."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from .errors import InvalidArgumentError
from .generate_call import ConstraintSpec
from .json_file import is_unicode
from .json_schema import checked_schema
from .vocabulary import shortened

MAX_SOURCE_BYTES = 1 << 20
# Time and memory of a regular expression grow with the square of its length.
MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_BYTES = 32_768
MAX_GRAMMAR_RULES = 500
# Intersections multiply the states of what they join.
MAX_INTERSECTIONS = 8

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
    (
        re.compile(r"(?m)^\s*[?!]?\w+\s*\[[^\]\n]*\]\s*:"),
        "attributes of rules are not supported: {}",
    ),
    (re.compile(r"<"), "tokens by name or id are not supported: {}"),
    (re.compile(r"~(?!\s*\d)"), "complements are not supported: {}"),
)


def num_bytes(spec: ConstraintSpec) -> int:
    """Of its source."""
    return sum(len(text.encode(errors="replace")) for text in (spec.source, *spec.choices))


def grammar_text(spec: ConstraintSpec, leading: str) -> str:
    """The library's form of a constraint, after the text `leading`."""
    if not all(map(is_unicode, (spec.source, *spec.choices))):
        raise InvalidArgumentError(spec.kind, "holds half of a surrogate pair, which is no text")
    _check_size(spec.kind, num_bytes(spec), MAX_SOURCE_BYTES, "bytes")
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
        raise InvalidArgumentError("grammar", f"is no GBNF: {shortened(str(error))}") from error
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
