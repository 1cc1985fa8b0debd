"""Token ids to text, one at a time, whole characters only."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
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

    @property
    def is_byte_level(self) -> bool:
        """Each letter of a token, but of an added one, stands for a byte."""
        return self._byte_level

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


class Detokenizer:
    """Text of one stream of tokens: constant work a token, and the join of the parts is the whole.

    Bytes that are not yet a character are held (three at most); those that can never become one
    turn into U+FFFD, as in a decoding of the whole.
    """

    def __init__(
        self, tokens: TokenBytes, *, at_text_start: bool = True, keep_control: bool = False
    ) -> None:
        """at_text_start False: the text goes on from another, so that no leading space is taken off
        (sentencepiece writes one before the first word). keep_control: control tokens appear."""
        self._tokens = tokens
        self._keep_control = keep_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_left = tokens.strip_count if at_text_start else 0

    def push(self, token_id: int) -> str:
        """Characters that this token completes; may be empty."""
        data = self._tokens.get(token_id, self._keep_control)
        return self._strip(self._utf8.decode(data)) if data else ""

    def push_kept(self, token_id: int) -> str:
        """As push, but the token appears also when it is a control token."""
        return self._strip(self._utf8.decode(self._tokens.get(token_id, True)))

    def finish(self) -> str:
        """What the held bytes are worth at the end: nothing or one U+FFFD."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._tokens.strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


def decode(tokens: TokenBytes, token_ids: Iterable[int], *, keep_control: bool = False) -> str:
    """The text of all the ids."""
    detokenizer = Detokenizer(tokens, keep_control=keep_control)
    parts = [detokenizer.push(token_id) for token_id in token_ids]
    return "".join(parts) + detokenizer.finish()
