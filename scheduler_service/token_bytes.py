"""The bytes of each token, as the checkpoint's decoder would join them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .json_file import ModelFilesError

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Token id to bytes. Joined bytes, read as UTF-8, are the text.

    Byte-level tokenizers, and sentencepiece ones with or without byte fallback. An id without a
    token (padding of the vocabulary) has no bytes.
    """

    def __init__(
        self,
        decoder: dict[str, Any] | None,
        id_to_token: Callable[[int], str | None],
        control_ids: frozenset[int],
    ) -> None:
        """decoder as in tokenizer.json; ModelFilesError names a kind that is not understood.

        control_ids are the special tokens: left out of the text unless asked for.
        """
        self._id_to_token = id_to_token
        self._control_ids = control_ids
        self._known: dict[int, bytes] = {}
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = False
        self._byte_fallback = False
        # How many of a character the decoder takes off the start of a text.
        self.strip_char = " "
        self.strip_count = 0
        for step in _steps(decoder):
            self._add_step(step)
        self._alphabet = _byte_level_alphabet() if self._byte_level else {}

    def get(self, token_id: int, keep_control: bool = False) -> bytes:
        if token_id in self._control_ids and not keep_control:
            return b""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._decode(self._id_to_token(token_id) or "")
        return found

    def _decode(self, token: str) -> bytes:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._byte_level and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        return token.encode()

    def _add_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0}:
                self.strip_char, self.strip_count = char, count
            case {"type": "Metaspace", "replacement": str(old)}:
                self._replacements.append((old, " "))
                self.strip_count = int(step.get("prepend_scheme", "always") != "never")
            case _:
                raise ModelFilesError(
                    f"tokenizer.json: decoder {step} is not supported; ByteLevel and "
                    "sentencepiece's Replace, ByteFallback, Fuse, Strip, Metaspace are"
                )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ModelFilesError("tokenizer.json: decoder is null; text cannot be made of its tokens")
    if decoder.get("type") == "Sequence":
        return [step for item in decoder.get("decoders", []) for step in _steps(item)]
    return [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: bytes that print stand for themselves, the rest from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printing}
    others = (byte for byte in range(0x100) if byte not in set(printing))
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return alphabet
