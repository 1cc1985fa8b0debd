"""Which JSON Schemas are taken: only keywords that are honoured, and bounded work."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn, TypeGuard

from .errors import InvalidArgumentError
from .json_file import is_unicode

FIELD = "json_schema"
MAX_SCHEMAS = 10_000
MAX_PATTERN_CHARS = 4096
MAX_PATTERN_CHARS_IN_ALL = 16_384
# Names are told apart from each pattern, and patterns from each other.
MAX_PATTERN_PROPERTIES = 64
# Of patterns that one text may have to match together: they multiply each other's states.
MAX_JOINED_PATTERNS = 8
# A remainder for each; 0.25 counts as 25.
MAX_MULTIPLE_OF = 10_000

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# The library counts in floats, and overflows its stack where two bounds are below its integers.
MAX_BOUND = 1 << 53

# More are none for Python.
MAX_DIGITS = 4300

# They say nothing about which values are allowed. So do those that begin with "x-".
# fmt: off
ANNOTATIONS = frozenset((
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly",
    "discriminator", "$comment", "$schema", "$id", "$anchor",
))
# fmt: on
IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties")
# fmt: off
HONOURED = IN_PLACE.union(MAPS, LISTS, SINGLE, (
    "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "multipleOf", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum",
))
# fmt: on


def checked_schema(source: str) -> dict[str, Any]:
    """The schema in a JSON text; InvalidArgumentError names what is wrong, unknown or too much."""
    schema = _parsed(source)
    nodes = list(_subschemas(schema))
    patterns = [text for _, node in nodes for text in _patterns(node)]
    _check_at_most(max(map(len, patterns), default=0), MAX_PATTERN_CHARS, "characters of a pattern")
    _check_at_most(sum(map(len, patterns)), MAX_PATTERN_CHARS_IN_ALL, "characters of all patterns")
    num_names = sum(len(node.get("patternProperties", ())) for _, node in nodes)
    _check_at_most(num_names, MAX_PATTERN_PROPERTIES, "patternProperties")
    found = (node.get("multipleOf") for _, node in nodes)
    multiples = [_digits(multiple) for multiple in found if _is_number(multiple)]
    _check_at_most(sum(multiples), MAX_MULTIPLE_OF, "remainders of every multipleOf")
    if any(_joins(node) for _, node in nodes):
        num_joined = len(patterns) + sum("format" in node for _, node in nodes)
        _check_at_most(num_joined, MAX_JOINED_PATTERNS, "patterns and formats, joined by allOf")
        remainders = math.lcm(*multiples)
        _check_at_most(remainders, MAX_MULTIPLE_OF, "remainders of multipleOf, joined by allOf,")
    return schema


def _parsed(source: str) -> dict[str, Any]:
    try:
        value = json.loads(
            source, parse_constant=_no_number, parse_int=_int, object_pairs_hook=_no_key_twice
        )
    except RecursionError:
        raise InvalidArgumentError(FIELD, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidArgumentError(FIELD, f"is no JSON text: {error}") from error
    if value is False:
        raise InvalidArgumentError(FIELD, "false allows no value")
    if not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise InvalidArgumentError(FIELD, "holds half of a surrogate pair, which is no text")
    return {} if value is True else _object(value, "the schema")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _int(digits: str) -> int:
    _check_at_most(len(digits), MAX_DIGITS, "digits of a number")
    return int(digits)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise InvalidArgumentError(
            FIELD, f"an object has the key {json.dumps(twice)[:60]} twice; leave one out"
        )
    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgumentError(FIELD, f"{where} is {json.dumps(value)[:60]}, not an object")
    return value


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema object in the schema, itself included, with its path; checked on the way."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    num_seen = 0
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, bool):
            continue
        node = _object(value, path or "the schema")
        num_seen += 1
        _check_at_most(num_seen, MAX_SCHEMAS, "schemas")
        _check_keywords(path, node)
        waiting.extend(_children(path, node))
        yield path, node


def _children(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in MAPS:
        for name, value in _object(node.get(key, {}), f"{path}/{key}").items():
            yield f"{path}/{key}/{name[:60]}", value
    for key in LISTS:
        values = node.get(key, [])
        if not isinstance(values, list):
            raise InvalidArgumentError(FIELD, f"{path}/{key} is not a list")
        yield from ((f"{path}/{key}/{i}", value) for i, value in enumerate(values))
    for key in SINGLE:
        if isinstance(values := node.get(key, True), list) and key == "items":
            yield from ((f"{path}/{key}/{i}", value) for i, value in enumerate(values))
        else:
            yield f"{path}/{key}", values


def _check_keywords(path: str, node: dict[str, Any]) -> None:
    for key in node:
        annotates = key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance")
        if not annotates and key not in HONOURED:
            raise InvalidArgumentError(
                FIELD, f"the keyword {path}/{key[:60]} is not supported; leave it out"
            )
    for key in BOUNDS:
        if _is_number(bound := node.get(key)) and abs(bound) > MAX_BOUND:
            raise InvalidArgumentError(
                FIELD,
                f"{path}/{key} is {str(bound)[:30]}; {-MAX_BOUND} to {MAX_BOUND} is taken, "
                "leave it out or take the nearest",
            )
    if _is_number(multiple := node.get("multipleOf")):
        _check_multiple(path, multiple)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_multiple(path: str, multiple: float) -> None:
    if not 0 < multiple < float("inf"):
        raise InvalidArgumentError(FIELD, f"{path}/multipleOf is {multiple}, not above 0")
    if _digits(multiple) > MAX_MULTIPLE_OF:
        raise InvalidArgumentError(
            FIELD,
            f"{path}/multipleOf is {str(multiple)[:30]}; at most {MAX_MULTIPLE_OF} is taken, "
            "the digits of a fraction counted as an integer",
        )


def _digits(multiple: float) -> int:
    """Remainders to be told apart: the digits of a fraction as an integer."""
    digits = "".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits))
    return max(int(digits), int(multiple))


def _patterns(node: dict[str, Any]) -> list[str]:
    own = node.get("pattern", "")
    return ([own] if isinstance(own, str) and own else []) + list(node.get("patternProperties", ()))


def _joins(node: dict[str, Any]) -> bool:
    """Whether a value must satisfy several of the schemas here at once."""
    says = [k for k in node if k in HONOURED and k not in ("$defs", "definitions")]
    return len(node.get("allOf", ())) > 1 or (len(says) > 1 and not IN_PLACE.isdisjoint(says))


def _check_at_most(value: int, limit: int, what: str) -> None:
    if value > limit:
        raise InvalidArgumentError(FIELD, f"{value} {what} are too many; at most {limit} are taken")
