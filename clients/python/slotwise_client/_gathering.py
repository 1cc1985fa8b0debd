"""Answers put together from the events of a stream."""

from dataclasses import replace

import grpc

from .errors import InternalError
from .types import (
    Accepted,
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    PromptLogprobs,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
)


class Gathering:
    """The events of one request as they come, whole at the end."""

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: dict[int, Finished] = {}

    def take(self, event: Event) -> None:
        """Add what is new."""
        match event:
            case Accepted():
                self._accepted = event
            case PromptLogprobs():
                self._prompt_logprobs += event.logprobs
            case Delta():
                self._deltas.setdefault(event.index, []).append(event)
            case Finished():
                self._finished[event.index] = event

    def completion(self) -> Completion:
        """InternalError when the stream had no beginning or no end."""
        if self._accepted is None or not self._finished:
            raise InternalError("the stream ended before its answer", grpc.StatusCode.INTERNAL)
        return Completion(
            request_id=self._accepted.request_id,
            accepted=self._accepted,
            choices=tuple(self._choice(index) for index in sorted(self._finished)),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )

    def _choice(self, index: int) -> Choice:
        deltas = self._deltas.get(index, [])
        return Choice(
            index=index,
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            text="".join(delta.text for delta in deltas),
            reasoning_text="".join(delta.reasoning_text for delta in deltas),
            tool_calls=_tool_calls([part for delta in deltas for part in delta.tool_calls]),
            logprobs=tuple(row for delta in deltas for row in delta.logprobs),
            finished=self._finished[index],
        )


def _tool_calls(parts: list[ToolCallDelta]) -> tuple[ToolCall, ...]:
    calls: dict[int, ToolCall] = {}
    pieces: dict[int, list[str]] = {}
    for part in parts:
        calls.setdefault(part.index, ToolCall(part.id, part.name, ""))
        pieces.setdefault(part.index, []).append(part.arguments_json)
    return tuple(
        replace(calls[index], arguments_json="".join(pieces[index])) for index in sorted(calls)
    )
