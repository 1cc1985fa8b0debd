"""One answer to a call: its events to what its caller sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .chat_output import NOTHING, OutputParser, OutputPiece, ToolCallPiece
from .detokenizer import TokenBytes
from .engine import Engine
from .errors import (
    ConstraintError,
    CorruptedError,
    DeadlineError,
    OutOfRangeError,
    SlotwiseError,
    UnavailableError,
)
from .logprobs import TokenLogprobs, describe
from .request import (
    Event,
    FinishedEvent,
    FinishReason,
    PromptLogprobsEvent,
    Request,
    TokenEvent,
)
from .text_stream import TextDelta, TextStream

# By FinishedEvent.status; what is not here is a fault of the model.
_ERRORS: dict[str, type[SlotwiseError]] = {
    "UNAVAILABLE": UnavailableError,
    "FAILED_PRECONDITION": ConstraintError,
}
# All that an answer can end with, for who reads it.
ANSWER_ERRORS = (
    ConstraintError,
    CorruptedError,
    DeadlineError,
    OutOfRangeError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class End:
    """How an answer ended, when not by an error."""

    event: FinishedEvent
    matched_stop: str | None


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of an answer; `end` on its last one.

    `index`: which answer. first_token_index counts generated tokens, first_prompt_index those of
    the prompt. `logprobs`: one for each token where they were asked for.
    """

    index: int
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    first_prompt_index: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # What was held back until the end; no token of its own.
    tail: OutputPiece = NOTHING
    end: End | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing for a delta."""
        return not (self.token_ids or self.text or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Where a reader goes on: what comes before it has. A tail counts as a token."""

    token_index: int = 0
    prompt_index: int = 0


FROM_START = ReadFrom()


class Answer:
    """One answer to a call: its request, and its text as it comes."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        text: TextStream,
        tokens: TokenBytes,
        parser: OutputParser | None,
        read_from: ReadFrom = FROM_START,
    ) -> None:
        """`parser`: tells reasoning and tool calls apart from the text."""
        self.request = request
        self.has_ended = False
        self._engine = engine
        self._text = text
        self._tokens = tokens
        self._parser = parser
        self._from = read_from

    def update(self, events: Sequence[Event]) -> Update:
        """Joins events; what its reader has is left out.

        One of ANSWER_ERRORS, and it has ended: when that is how the request did; OutOfRangeError
        when it ended before its reader's place.
        """
        first = max(self._text.num_tokens, self._from.token_index)
        ids: list[int] = []
        texts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        first_prompt_index, prompt_logprobs = 0, tuple[TokenLogprobs, ...]()
        tail, end = NOTHING, None
        for event in events:
            match event:
                case TokenEvent():
                    event = self._after_known(event)
                    delta = self._push(event.token_ids)
                    ids += delta.token_ids
                    texts.append(delta.text)
                    wanted = event.logprobs[: len(delta.token_ids)]
                    logprobs += describe(delta.token_ids, wanted, self._tokens) if wanted else ()
                case PromptLogprobsEvent():
                    num_known = max(0, self._from.prompt_index - event.first_index)
                    new = self._of_prompt(event)[num_known:]
                    first_prompt_index = first_prompt_index or event.first_index + num_known
                    prompt_logprobs += new
                case FinishedEvent():
                    self.has_ended = True
                    end = self._end(event)
        piece = self._parsed("".join(texts))
        if end is not None:
            tail = self._tail()
        return Update(
            self.request.choice_index,
            first,
            tuple(ids),
            piece.text,
            tuple(logprobs),
            piece.reasoning,
            piece.tool_calls,
            first_prompt_index,
            prompt_logprobs,
            tail,
            end,
        )

    def _after_known(self, event: TokenEvent) -> TokenEvent:
        """The part of an event that the reader does not have; the other part is taken in."""
        num_known = self._from.token_index - event.first_index
        if num_known <= 0:
            return event
        self._parsed(self._push(event.token_ids[:num_known]).text)
        return TokenEvent(
            event.request_id,
            event.first_index + num_known,
            event.token_ids[num_known:],
            event.logprobs[num_known:],
        )

    def _tail(self) -> OutputPiece:
        """What is still held, unless the reader has it. OutOfRangeError as of `update`."""
        tail = self._parsed(self._text.finish())
        if self._parser is not None:
            tail += self._parser.finish()
        num_beyond = self._from.token_index - self._text.num_tokens
        if num_beyond > (tail != NOTHING):
            raise OutOfRangeError(
                f"next_token_index {self._from.token_index} is beyond the end of request "
                f"{self.request.call_id!r}: answer {self.request.choice_index} has "
                f"{self._text.num_tokens} tokens"
            )
        return NOTHING if num_beyond > 0 else tail

    def _parsed(self, text: str) -> OutputPiece:
        return OutputPiece(text) if self._parser is None else self._parser.push(text)

    def _of_prompt(self, event: PromptLogprobsEvent) -> tuple[TokenLogprobs, ...]:
        begin = event.first_index
        ids = self.request.prompt_token_ids[begin : begin + len(event.logprobs)]
        return describe(ids, event.logprobs, self._tokens)

    def _push(self, token_ids: Sequence[int]) -> TextDelta:
        running = self._text.matched_stop is None
        delta = self._text.push(token_ids)
        if running and self._text.matched_stop is not None:
            self._engine.stop_request(self.request, self._text.num_tokens)
        return delta

    def _end(self, event: FinishedEvent) -> End:
        if self._text.matched_stop is not None:
            # Whatever ended it since: the caller's answer was complete at the stop string.
            event = replace(
                event,
                reason=FinishReason.STOP,
                num_generated_tokens=self._text.num_tokens,
                matched_token_id=None,
            )
            return End(event, self._text.matched_stop)
        match event.reason:
            case FinishReason.DEADLINE:
                raise DeadlineError(event.message or "the request's deadline passed")
            case FinishReason.ERROR:
                raise _ERRORS.get(event.status, CorruptedError)(event.message)
        return End(event, None)
