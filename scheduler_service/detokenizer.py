"""Token ids to text, one at a time, whole characters only."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .token_bytes import TokenBytes


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
