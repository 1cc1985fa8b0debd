"""The checkpoint's tokenizer: text to ids, with or without control tokens, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from .detokenizer import Detokenizer, TokenBytes, decode
from .json_file import JsonFile, ModelFilesError

# A normalizer makes at most this many characters, or bytes, into one.
MAX_SHRINK = 4


class Tokenizer:
    """Immutable, and safe to use from several threads: encoding lets other threads run.

    A control token is an added token of tokenizer.json (a piece of markup such as <|im_end|>),
    blank ones aside. Typed by a user it is plain text, unless the caller says otherwise.
    """

    def __init__(self, path: Path) -> None:
        """Reads tokenizer.json; ModelFilesError when it is missing, malformed or not supported."""
        file = JsonFile.read(path)
        added = _added_tokens(file)
        self._markup = _build(path, file, added)
        self._plain = _build(path, file, [token for token in added if not _is_control(token)])
        controls = [token for token in added if _is_control(token)]
        self.control_texts = frozenset(str(token["content"]) for token in controls)
        self.special_texts = frozenset(str(t["content"]) for t in controls if t.get("special"))
        special_ids = frozenset(int(token["id"]) for token in added if token.get("special"))
        self.tokens = TokenBytes(file.raw("decoder"), self._markup.id_to_token, special_ids)
        # Only for control tokens that are declared to match in normalized text.
        normalizes = any(token.get("normalized") for token in controls)
        self._normalizer = self._markup.normalizer if normalizes else None
        vocabulary = self._markup.get_vocab(with_added_tokens=True)
        self._counts_bytes = self.tokens.is_byte_level
        # In bytes, which each letter of a byte-level token stands for, else in characters.
        self._longest = max(map(len, vocabulary), default=1)
        if self._counts_bytes:
            added_texts = (str(token["content"]).encode() for token in added)
            self._longest = max(self._longest, *map(len, added_texts), 1)
        self._check_plain(path, (file.raw("model") or {}).get("unk_token"))

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact text."""
        found: int | None = self._markup.token_to_id(text)
        return found

    def encode(
        self, text: str, *, parse_control_tokens: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Ids of a text. Blocks: about a second for 5 MB, without holding the interpreter's lock.

        parse_control_tokens: control tokens written in the text become their ids.
        add_special_tokens: the checkpoint's own frame (often a begin token) is put around.
        """
        chosen = self._markup if parse_control_tokens else self._plain
        # The batch call, unlike encode, releases the lock and computes no offsets.
        (encoding,) = chosen.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Iterable[int], *, keep_control_tokens: bool = False) -> str:
        return decode(self.tokens, token_ids, keep_control=keep_control_tokens)

    def detokenizer(self, *, at_text_start: bool) -> Detokenizer:
        return Detokenizer(self.tokens, at_text_start=at_text_start)

    def normalize(self, text: str) -> str:
        """The text in which control tokens are looked for: as it is, for nearly all tokenizers."""
        return self._normalizer.normalize_str(text) if self._normalizer else text

    def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        """True when no tokenization of the text has num_tokens tokens or fewer. Costs little."""
        size = len(text.encode()) if self._counts_bytes else len(text)
        return size > num_tokens * self._longest * MAX_SHRINK

    def _check_plain(self, path: Path, unknown_token: str | None) -> None:
        for text in self.special_texts - {unknown_token}:
            if self.token_id(text) in self.encode(text):
                raise ModelFilesError(
                    f"{path}: the plain text {text!r} would still become the control id "
                    f"{self.token_id(text)}; users' text could not be kept from being markup"
                )


def _added_tokens(file: JsonFile) -> list[dict[str, Any]]:
    added = file.raw("added_tokens") or []
    if not isinstance(added, list) or not all(map(_is_token, added)):
        raise file.wrong("added_tokens", "a list of tokens, each with an id and its content")
    return added


def _is_token(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("id"), int)
        and isinstance(value.get("content"), str)
    )


def _is_control(token: dict[str, Any]) -> bool:
    return bool(re.search(r"\S", str(token["content"])))


def _build(path: Path, file: JsonFile, added: list[dict[str, Any]]) -> tokenizers.Tokenizer:
    keys = ("version", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
    values = {key: file.raw(key) for key in keys}
    # The server decides lengths itself: truncation and padding of the file are not used.
    values |= {"added_tokens": added, "truncation": None, "padding": None}
    values["model"] = _with_ids(values["model"], added)
    try:
        built = tokenizers.Tokenizer.from_str(json.dumps(values))
    except Exception as error:  # the library raises plain Exception
        raise ModelFilesError(f"{path}: not a usable tokenizer: {error}") from error
    for token in added:
        found = built.token_to_id(token["content"])
        if found != token["id"]:
            raise ModelFilesError(
                f"{path}: added token {token['content']!r} has id {token['id']}, "
                f"but reads as {found}"
            )
    return built


def _with_ids(model: Any, added: list[dict[str, Any]]) -> Any:
    """The library numbers added tokens by itself, unless the model knows them by their id."""
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        return model
    ids = {token["content"]: token["id"] for token in added}
    return {**model, "vocab": {**ids, **model["vocab"]}}
