"""What came of one answer, and where in it the present stream is."""

from collections.abc import Iterator

import grpc

from slotwise.v1 import inference_pb2 as pb

from .errors import InternalError


class DifferenceError(Exception):
    """A stream repeats what came otherwise."""


class Received:
    """Tokens, text, reasoning and tool calls of one choice.

    A stream that begins again, at the first token or behind the last one that came, repeats a part;
    `take` compares it and leaves it out. A server's text behind a token depends on the tokens up to
    it alone; what was held back until the end comes after the last token.
    """

    def __init__(self, first_index: int = 0) -> None:
        """`first_index`: of the first token that is looked at; those before it are not known."""
        self.is_finished = False
        self._first_index = first_index
        self._token_ids: list[int] = []
        # Tokens of the present stream, in the same count.
        self._token = first_index
        self._text = _Text()
        self._reasoning = _Text()
        self._calls: list[_Call] = []
        # The present stream may repeat what came.
        self._repeats = False

    @property
    def num_tokens(self) -> int:
        """Tokens that came, those before `first_index` included."""
        return self._first_index + len(self._token_ids)

    def rewind(self, *, to_start: bool) -> None:
        """Another stream follows: from the start, or from token `num_tokens` on."""
        self._repeats = True
        self._token = self._first_index if to_start else self.num_tokens
        for text in self._texts():
            text.rewind(to_start)
        for call in self._calls:
            call.rewind(to_start)

    def take(self, delta: pb.Delta) -> bool:
        """Cut the delta to what is new; whether anything is.

        DifferenceError when the rest is not what came; InternalError when something is missing.
        """
        num_new = len(delta.token_ids)
        has_tokens = num_new > 0
        if has_tokens:
            self._take_tokens(delta, num_new)
        if not self._repeats and not delta.reasoning_text and not delta.tool_calls:
            # Nearly always so.
            piece = delta.text
            self._text.add(piece, has_tokens)
            return has_tokens or bool(piece)
        delta.text = self._text.take(delta.text, "text")
        delta.reasoning_text = self._reasoning.take(delta.reasoning_text, "reasoning")
        if delta.tool_calls:
            self._take_calls(delta)
        if has_tokens and self._token == self.num_tokens:
            for text in self._texts():
                text.mark()
            for call in self._calls:
                call.mark()
            # What came behind the last token may still be repeated.
            self._repeats = not all(text.is_at_end for text in self._all_texts())
        return bool(delta.token_ids or delta.text or delta.reasoning_text or delta.tool_calls)

    def finish(self) -> bool:
        """Its last message came; False: once more."""
        was_finished, self.is_finished = self.is_finished, True
        return not was_finished

    def _take_tokens(self, delta: pb.Delta, num_tokens: int) -> None:
        if delta.first_token_index != self._token:
            raise InternalError(
                f"tokens are missing in the stream of choice {delta.index}: it goes on at "
                f"{delta.first_token_index} and had come to {self._token}",
                grpc.StatusCode.INTERNAL,
            )
        # None where the stream repeats nothing.
        num_known = min(self.num_tokens - self._token, num_tokens) if self._repeats else 0
        self._token += num_tokens
        if num_known:
            self._compare(delta, num_known)
            del delta.token_ids[:num_known]
            del delta.logprobs[:num_known]
            delta.first_token_index += num_known
        self._token_ids += delta.token_ids

    def _compare(self, delta: pb.Delta, num_known: int) -> None:
        begin = delta.first_token_index
        place = begin - self._first_index
        known = self._token_ids[place : place + num_known]
        for i, (new, old) in enumerate(zip(delta.token_ids, known, strict=False), begin):
            if new != old:
                raise DifferenceError(f"token {i} is {new} and was {old}")

    def _take_calls(self, delta: pb.Delta) -> None:
        parts = list(delta.tool_calls)
        del delta.tool_calls[:]
        for part in parts:
            if part.index == len(self._calls):
                self._calls.append(_Call(part.name))
            if part.index > len(self._calls):
                raise InternalError(
                    f"a tool call is missing in the stream of choice {delta.index}: part of call "
                    f"{part.index} came and call {len(self._calls)} had not",
                    grpc.StatusCode.INTERNAL,
                )
            if self._calls[part.index].take(part):
                delta.tool_calls.append(part)

    def _texts(self) -> Iterator["_Text"]:
        yield self._text
        yield self._reasoning

    def _all_texts(self) -> Iterator["_Text"]:
        yield from self._texts()
        yield from (call.arguments for call in self._calls)


class _Text:
    """A text as it came, how far the present stream is in it, and how far the last token's was."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._at = 0
        self._mark = 0

    @property
    def is_at_end(self) -> bool:
        """The present stream goes on where the text ends."""
        return self._at == self._length

    def add(self, piece: str, with_token: bool) -> None:
        """What is new in any case."""
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)
            self._at = self._length
        if with_token:
            self._mark = self._length

    def mark(self) -> None:
        """The last token came with what the present stream has told."""
        self._mark = self._at

    def rewind(self, to_start: bool) -> None:
        self._at = 0 if to_start else self._mark

    def take(self, piece: str, name: str) -> str:
        """What is new of the stream's next piece."""
        num_known = min(self._length - self._at, len(piece))
        if num_known:
            self._compare(piece[:num_known], name)
            piece = piece[num_known:]
        self._at += num_known + len(piece)
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)
        return piece

    def _compare(self, piece: str, name: str) -> None:
        whole = "".join(self._pieces)
        self._pieces = [whole]
        known = whole[self._at : self._at + len(piece)]
        if piece != known:
            raise DifferenceError(f"the {name} has {piece!r} where it had {known!r}")


class _Call:
    """A tool call as it came."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.arguments = _Text()
        self._was_told = False
        # The present stream has told of it; and had when the last token came.
        self._is_open = False
        self._mark = False

    def mark(self) -> None:
        self._mark = self._is_open
        self.arguments.mark()

    def rewind(self, to_start: bool) -> None:
        self._is_open = not to_start and self._mark
        self.arguments.rewind(to_start)

    def take(self, part: pb.ToolCallDelta) -> bool:
        """Cut a part to what is new; whether anything is. The id that came first stays."""
        is_repeated = self._was_told and not self._is_open
        is_new = not self._was_told
        self._is_open = self._was_told = True
        if is_repeated:
            if part.name != self._name:
                raise DifferenceError(
                    f"tool call {part.index} is {part.name!r} and was {self._name!r}"
                )
            part.ClearField("id")
            part.ClearField("name")
        part.arguments_json = self.arguments.take(part.arguments_json, "tool call")
        return is_new or bool(part.arguments_json)
