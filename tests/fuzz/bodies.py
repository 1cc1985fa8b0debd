"""Bodies of calls that no honest client sends: each one follows from a seed and its number."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from message_strategies import NUMBERS, TEXTS, UNKNOWN

VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32 = range(6)
# Of a message, and of what a field is repeated to now and then.
MAX_FIELDS, MANY = 5, 300
# Compiling what an output must be takes the time of a thousand refusals.
RARE_FIELDS = {"json_schema", "json_object", "regex", "grammar", "choice"}
RARE_SHARE = 0.05
HUGE_LENGTHS = (1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)
# In JSON, and where a text is read as one.
DEEP = ('{"a":' * 200, "[" * 20_000, "(" * 2000, "{%if 1%}" * 300)


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes for a call of `method` ("/package.Service/Method"), and how they were made."""

    number: int
    method: str
    data: bytes
    made_by: str


class BodyMaker:
    """`good`: by method, messages that are answered well."""

    def __init__(self, seed: int, good: dict[str, list[Message]]) -> None:
        self._seed = seed
        self._good = good
        # As many times as there is something to say in them.
        self._methods = [
            name for name, messages in good.items() for _ in range(_weight(messages[0].DESCRIPTOR))
        ]
        self._all_good = [one for messages in good.values() for one in messages]
        self._makers: list[Callable[[random.Random, str], bytes]] = [
            self._drawn,
            self._changed,
            self._changed,
            self._flipped,
            self._flipped,
            self._rewired,
            self._rewired,
            self._of_another,
            self._noise,
        ]

    def body(self, number: int) -> Body:
        rng = random.Random(f"{self._seed}/{number}")
        method = rng.choice(self._methods)
        make = rng.choice(self._makers)
        return Body(number, method, make(rng, method), make.__name__.strip("_"))

    def _drawn(self, rng: random.Random, method: str) -> bytes:
        """Well made, of whatever values the fields can have."""
        return drawn(rng, self._good[method][0].DESCRIPTOR).SerializeToString()

    def _changed(self, rng: random.Random, method: str) -> bytes:
        """A good message but for some fields, so that it gets further."""
        good = rng.choice(self._good[method])
        message = type(good)()
        message.CopyFrom(good)
        message.MergeFrom(drawn(rng, good.DESCRIPTOR, max_fields=2))
        return message.SerializeToString()

    def _flipped(self, rng: random.Random, method: str) -> bytes:
        """Bytes changed, doubled, left out, put in, or cut off."""
        return flipped(rng, rng.choice(self._good[method]).SerializeToString())

    def _rewired(self, rng: random.Random, method: str) -> bytes:
        """Fields with another number, type or length than they should have."""
        return rewired(rng, rng.choice(self._good[method]).SerializeToString())

    def _of_another(self, rng: random.Random, method: str) -> bytes:
        """A message of another call, or two spliced."""
        left = rng.choice(self._all_good).SerializeToString()
        right = rng.choice(self._good[method]).SerializeToString()
        return left[: rng.randrange(len(left) + 1)] + right[rng.randrange(len(right) + 1) :]

    def _noise(self, rng: random.Random, method: str) -> bytes:
        return rng.randbytes(rng.choice([0, 1, 2, 10, 60, 1000]))


def _weight(descriptor: Descriptor) -> int:
    return min(12, 1 + len(descriptor.fields))


def methods_of(service: ServiceDescriptor) -> Iterable[tuple[str, Any]]:
    """("/package.Service/Method", its descriptor) of each."""
    for method in service.methods:
        yield f"/{service.full_name}/{method.name}", method


def drawn(
    rng: random.Random, descriptor: Descriptor, max_fields: int = MAX_FIELDS, depth: int = 0
) -> Message:
    """Any message of this kind, mostly of border values."""
    message = GetMessageClass(descriptor)()
    fields = list(descriptor.fields)
    for field in rng.sample(fields, min(len(fields), rng.randrange(max_fields + 1))):
        if field.name not in RARE_FIELDS or rng.random() < RARE_SHARE:
            _set(rng, message, field, depth)
    if rng.random() < 0.03:
        message.MergeFromString(UNKNOWN)
    return message


def _set(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields
        for _ in range(rng.choice([1, 3, 40, 1025 if rng.random() < 0.05 else 2])):
            getattr(message, field.name)[_scalar(rng, key)] = _scalar(rng, value)
        return

    def one() -> Any:
        return drawn(rng, kind, depth=depth + 1) if kind is not None else _scalar(rng, field)

    if field.is_repeated:
        values = [one() for _ in range(rng.randrange(4))]
        getattr(message, field.name).extend(values * (MANY if rng.random() < 0.02 else 1))
    elif kind is not None:
        getattr(message, field.name).CopyFrom(one())
    else:
        setattr(message, field.name, one())


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice([0, 1, 20, 64]))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if rng.random() < 0.02:
            return rng.choice(DEEP)
        return rng.choice(TEXTS) if rng.random() < 0.7 else _text(rng)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([0, 1, 99])
    return rng.choice(NUMBERS[field.cpp_type])


def _text(rng: random.Random) -> str:
    """Of letters, controls, marks, private-use and astral characters; never a lone surrogate."""
    ranges = ((0, 0x7F), (0x80, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randrange(12)))


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Of the bytes some changed, doubled, left out or put in; now and then the end is cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0:
                changed[place : place + 1] = rng.randbytes(1)
            case 1:
                if place < len(changed):
                    changed[place] ^= 1 << rng.randrange(8)
            case 2:
                changed[place:place] = rng.randbytes(rng.choice([1, 3, 30]))
            case 3:
                del changed[place : place + rng.choice([1, 3, 30])]
            case 4:
                changed[place:place] = changed[place : place + 20] * rng.choice([1, 50])
            case 5:
                changed[place : place + 1] = rng.choice([b"\xff", b"\0", b"\x80\x80\x01", b"\xc0"])
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.1 else changed)


def rewired(rng: random.Random, data: bytes, depth: int = 0) -> bytes:
    """The message's fields in their order, one or two of them made into something else."""
    fields = list(split(data))
    for _ in range(rng.choice([1, 1, 2])):
        if not fields:
            return _strange_field(rng, 1, b"")
        place = rng.randrange(len(fields))
        number, wire, value = fields[place]
        if wire == LENGTH and depth < 4 and rng.random() < 0.5:
            value = rewired(rng, value, depth + 1)
            fields[place] = (number, wire, value)
            continue
        strange = _strange_field(rng, number, value)
        before = b"".join(join(*field) for field in fields[:place])
        return before + strange + b"".join(join(*field) for field in fields[place + 1 :])
    return b"".join(join(*field) for field in fields)


def _strange_field(rng: random.Random, number: int, value: bytes) -> bytes:
    match rng.randrange(9):
        case 0:
            return tag(number, rng.randrange(8)) + value
        case 1:
            # The length of what is not there.
            return tag(number, LENGTH) + varint(rng.choice(HUGE_LENGTHS)) + value
        case 2:
            return join(rng.choice([0, 15, 99, 19_000, (1 << 29) - 1]), LENGTH, value)
        case 3:
            # Groups in groups; a reader must not follow them for ever.
            return tag(number, GROUP) * rng.choice([1, 50, 101, 5000])
        case 4:
            return tag(number, END_GROUP) + value
        case 5:
            return tag(number, VARINT) + b"\xff" * rng.choice([1, 9, 10, 11, 30]) + b"\x01"
        case 6:
            floats = [float("nan"), float("inf"), -float("inf"), 1e-45, 3.4e38]
            return tag(number, FIXED32) + struct.pack("<f", rng.choice(floats))
        case 7:
            not_utf8 = rng.choice([b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"])
            return join(number, LENGTH, value + not_utf8)
        case _:
            # A message in a message in a message, where none is.
            inner = value
            for _ in range(rng.choice([3, 30, 120])):
                inner = join(number, LENGTH, inner)
            return inner


def split(data: bytes) -> Iterable[tuple[int, int, bytes]]:
    """(number, wire type, value without its length) of a good message's fields."""
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == LENGTH:
            size, place = _read_varint(data, place)
            end = place + size
        elif wire == VARINT:
            _, end = _read_varint(data, place)
        else:
            end = place + {FIXED32: 4, FIXED64: 8}.get(wire, len(data))
        if not number or end > len(data):
            return
        yield number, wire, data[place:end]
        place = end


def join(number: int, wire: int, value: bytes) -> bytes:
    size = varint(len(value)) if wire == LENGTH else b""
    return tag(number, wire) + size + value


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Of bytes that end too early, what there is."""
    value = shift = 0
    while place < len(data):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            break
    return value, place
