"""The reference part of docs/api.md, made from the comments of the public proto.

As a program (`make docs-api`) it writes that part of the page anew; test_api_docs.py compares.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as dp
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
BEGIN = "<!-- from inference.proto, by `make docs-api`: begin -->\n"
END = "<!-- end -->\n"

# Places in a descriptor, as source_code_info names them.
MESSAGE, ENUM, SERVICE, METHOD, FIELD, VALUE, ONEOF = 4, 5, 6, 2, 2, 2, 8
Path_ = tuple[int, ...]


def read_proto() -> dp.FileDescriptorProto:
    """The public API with its comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.bin"
        name = "slotwise/v1/inference.proto"
        command = ["protoc", f"-I{ROOT / 'protos'}", "--include_source_info"]
        if protoc.main([*command, f"--descriptor_set_out={out}", name]):
            raise RuntimeError(f"{name} does not compile")
        (file,) = dp.FileDescriptorSet.FromString(out.read_bytes()).file
    return file


class Reference:
    """Markdown of every rpc, message and enum, in the order of the proto."""

    def __init__(self, file: dp.FileDescriptorProto) -> None:
        self._file = file
        self._comments: dict[Path_, str] = {
            tuple(place.path): place.leading_comments.strip()
            for place in file.source_code_info.location
        }

    def text(self) -> str:
        """All of it."""
        parts = ["### Calls\n"]
        for s, service in enumerate(self._file.service):
            for m, method in enumerate(service.method):
                parts.append(self._call(method, (SERVICE, s, METHOD, m)))
        parts.append("### Messages\n")
        for m, message in enumerate(self._file.message_type):
            parts.append("\n".join(self._message(message, (MESSAGE, m))))
        parts.append("### Enumerations\n")
        for e, enum in enumerate(self._file.enum_type):
            parts.append("\n".join(self._enum(enum, (ENUM, e))))
        return "\n".join(parts)

    def _call(self, method: dp.MethodDescriptorProto, path: Path_) -> str:
        stream = "stream " if method.server_streaming else ""
        sent, got = _short(method.input_type), _short(method.output_type)
        return f"**{method.name}** ({sent}) returns ({stream}{got}). {self._comment(path)}\n"

    def _message(self, message: dp.DescriptorProto, path: Path_) -> Iterator[str]:
        yield f"#### message {message.name}\n"
        if comment := self._comment(path):
            yield f"{comment}\n"
        if not message.field:
            yield "No fields.\n"
            return
        yield "| field | type | meaning |\n|---|---|---|"
        maps = {f".{self._file.package}.{message.name}.{n.name}": n for n in message.nested_type}
        shown = set()
        for f, field in enumerate(message.field):
            real_oneof = field.HasField("oneof_index") and not field.proto3_optional
            if real_oneof and field.oneof_index not in shown:
                shown.add(field.oneof_index)
                name = message.oneof_decl[field.oneof_index].name
                about = self._comment((*path, ONEOF, field.oneof_index))
                yield f"| one of `{name}`: | | {_cell(about)} |"
            kind = _type(field, maps.get(field.type_name))
            yield f"| `{field.name}` | {kind} | {_cell(self._comment((*path, FIELD, f)))} |"
        yield ""

    def _enum(self, enum: dp.EnumDescriptorProto, path: Path_) -> Iterator[str]:
        yield f"#### enum {enum.name}\n\n| value | meaning |\n|---|---|"
        for v, value in enumerate(enum.value):
            yield f"| `{value.name}` | {_cell(self._comment((*path, VALUE, v)))} |"
        yield ""

    def _comment(self, path: Path_) -> str:
        return " ".join(self._comments.get(path, "").split())


def _type(field: dp.FieldDescriptorProto, entry: dp.DescriptorProto | None) -> str:
    if entry is not None and entry.options.map_entry:
        key, value = (_type(part, None) for part in entry.field)
        return f"map of {key} to {value}"
    label = "optional " if field.proto3_optional else ""
    if field.label == dp.FieldDescriptorProto.LABEL_REPEATED:
        label = "repeated "
    if field.type_name:
        kind = "enum" if field.type == dp.FieldDescriptorProto.TYPE_ENUM else "message"
        name = _short(field.type_name)
        return f"{label}[{name}](#{kind}-{name.lower()})"
    return label + dp.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _cell(text: str) -> str:
    """As a table and Markdown take it literally."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def parts_of(page: str) -> tuple[str, str, str]:
    """The page before, in and after the reference; ValueError when a mark is missing."""
    before, _, rest = page.partition(BEGIN)
    reference, _, after = rest.partition(END)
    if BEGIN not in page or END not in rest:
        raise ValueError(f"{PAGE} has no line {BEGIN.strip()!r} with an {END.strip()!r} after it")
    return before, reference, after


def main() -> None:
    before, _, after = parts_of(PAGE.read_text())
    reference = Reference(read_proto()).text()
    PAGE.write_text(before + BEGIN + "\n" + reference + "\n" + END + after)


if __name__ == "__main__":
    main()
