"""Hypothesis strategies for any message of a proto: every field, border values, unknown fields."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: [-(1 << 31), -2, -1, 0, 1, 20, (1 << 31) - 1],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2, 20, 21, 33, 255, 511, 512, 1 << 20, (1 << 32) - 1],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, (1 << 64) - 1],
    FieldDescriptor.CPPTYPE_FLOAT: [
        *(0.0, -0.0, 1e-45, 1e-7, 1e-5, 0.5, 1.0, 2.0, 2.5, 10.0, 11.0, 100.0, -100.0, 101.0),
        *(3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")),
    ],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
}
TEXTS = [
    *("", "a", "hello", "user", "assistant", "{}", "[]", '{"a": 1}', "{", "null", "<|im_end|>"),
    *("\x00", "\U0001f469\u200d\U0001f467", "\ufffd", "a" * 129, "x" * 257, "y" * 1025, "NaN"),
    *('{"type": "object"}', '{"type": 5}', "[a-z]+", "(", "start: A\nA: /b/", "root ::= [0-9]"),
    *("[" * 3000, '{"a":' * 500, "{{ 1 / 0 }}", '{"messages": []}'),
]
# A field of a later version: number 99, a varint.
UNKNOWN = b"\x98\x06\x01"


def messages_of(
    descriptor: Descriptor, depth: int = 0, max_fields: int = 6
) -> st.SearchStrategy[Message]:
    """Any message with so many fields; of a oneof the last one drawn stays."""

    @st.composite
    def build(draw: Any) -> Message:
        message = GetMessageClass(descriptor)()
        names = [field.name for field in descriptor.fields]
        for name in draw(st.lists(st.sampled_from(names), max_size=max_fields, unique=True)):
            _set(draw, message, descriptor.fields_by_name[name], depth)
        if draw(st.integers(0, 30)) == 0:
            message.MergeFromString(UNKNOWN)
        return message

    return build() if descriptor.fields else st.just(GetMessageClass(descriptor)())


def _set(draw: Any, message: Message, field: FieldDescriptor, depth: int) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        keys, values = (_scalars(part) for part in kind.fields)
        getattr(message, field.name).update(draw(st.dictionaries(keys, values, max_size=4)))
        return
    single = _scalars(field) if kind is None else messages_of(kind, depth + 1)
    if not field.is_repeated:
        value = draw(single)
        if kind is None:
            setattr(message, field.name, value)
        else:
            getattr(message, field.name).CopyFrom(value)
        return
    values = draw(st.lists(single, max_size=4 if depth else 6))
    # Sometimes far more than anyone needs.
    values *= draw(st.sampled_from([1] * 20 + [3, 300, 6000 if kind is None else 40]))
    getattr(message, field.name).extend(values)


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=20)
        plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
        return st.sampled_from(TEXTS) | plain
    return st.sampled_from(NUMBERS[field.cpp_type])
