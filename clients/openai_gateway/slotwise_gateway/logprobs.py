"""Logprobs of tokens, in the shapes of the two routes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from slotwise_client import TokenLogprob, TokenLogprobs

from .written import dumped


def token_text(token: bytes) -> str:
    """A token as a string; one that is no whole characters as `bytes:\\xe2\\x82`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(rows: Iterable[TokenLogprobs], num_best: int) -> dict[str, Any]:
    """Of a choice, or of a chunk of it."""
    content = [
        {
            **_chat_token(row.token),
            "top_logprobs": [_chat_token(one) for one in row.best[:num_best]],
        }
        for row in rows
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(token.text), "logprob": token.logprob, "bytes": list(token.text)}


class PromptRows:
    """Logprobs of a whole prompt, as vLLM has them; written as they come, for there may be many."""

    def __init__(self) -> None:
        # The first token follows nothing.
        self._written = ["null"]

    def add(self, rows: Iterable[TokenLogprobs]) -> None:
        """More tokens, in order."""
        self._written += (
            dumped({str(one.token_id): _ranked(one) for one in _with_token(row)}) for row in rows
        )

    def json(self) -> str:
        return f"[{','.join(self._written)}]"


def _with_token(row: TokenLogprobs) -> Iterable[TokenLogprob]:
    return (row.token, *(one for one in row.best if one.token_id != row.token.token_id))


def _ranked(token: TokenLogprob) -> dict[str, Any]:
    return {
        "logprob": token.logprob,
        "rank": token.rank,
        "decoded_token": token_text(token.text),
    }


class TextOffsets:
    """Where in the text of a choice each token begins, in characters."""

    def __init__(self, begin: int = 0) -> None:
        """`begin`: of the first token."""
        self._offset = begin
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, token: bytes) -> int:
        """Of the next token; one that goes on in a character begins where that does."""
        begin = self._offset
        self._offset += len(self._decoder.decode(token))
        return begin


class CompletionLogprobs:
    """The four lists of /v1/completions, of a choice or of a chunk of it; written as they come."""

    def __init__(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[str] = []
        self._best: list[str] = []
        self._offsets: list[str] = []

    def add_first(self, text: str) -> None:
        """The prompt's first token, which follows nothing."""
        self._tokens.append(dumped(text))
        self._logprobs.append("null")
        self._best.append("null")
        self._offsets.append("0")

    def add(self, rows: Iterable[TokenLogprobs], num_best: int, offsets: TextOffsets) -> None:
        """More tokens; the chosen one is among the best, as a last one if need be."""
        for row in rows:
            text = token_text(row.token.text)
            best: dict[str, float] = {}
            if num_best:
                for one in (*row.best[:num_best], row.token):
                    # Two tokens may have one text: the likelier one comes first.
                    best.setdefault(token_text(one.text), one.logprob)
            self._tokens.append(dumped(text))
            self._logprobs.append(dumped(row.token.logprob))
            self._best.append(dumped(best))
            self._offsets.append(str(offsets.next(row.token.text)))

    def json(self) -> str:
        return (
            f'{{"tokens":[{",".join(self._tokens)}],"token_logprobs":[{",".join(self._logprobs)}],'
            f'"top_logprobs":[{",".join(self._best)}],"text_offset":[{",".join(self._offsets)}]}}'
        )
