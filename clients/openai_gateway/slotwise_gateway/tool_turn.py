"""Answers whose tool calls must be well formed: written in parts, each with its constraint.

A call is <tool_call>, then {"name": ..., "arguments": ...} as Qwen's formats have it. The gateway
writes what is the same in every call; the model chooses the name among those of the tools, and
writes the arguments by their schema. Each part is a request of its own that goes on from the tokens
of those before, which the prefix cache has.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from slotwise_client import (
    Accepted,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateOptions,
    Prompt,
    Tool,
    ToolCallDelta,
    Usage,
)

CALL: Final = "<tool_call>"
ANY_OBJECT: Final = {"type": "object"}
# Options that do not go along into a call: its constraint alone says where it ends.
_OF_TEXT: Final = frozenset(
    ("stop", "stop_token_ids", "ignore_eos", "min_new_tokens", "include_stop_in_output")
)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`tools`: those that may be called, with the numbers that they have in the body.

    `is_forced`: the answer is one call. Else the model writes text, and calls where it likes;
    `is_single`: its first call ends it.
    """

    tools: tuple[tuple[int, Tool], ...]
    is_forced: bool
    is_single: bool


class Parts(Protocol):
    """What a turn asks the server; errors are ApiError."""

    def part(
        self, prompt: Prompt, options: GenerateOptions, tool: int | None
    ) -> AsyncIterator[Event]:
        """The events of a request; `tool`: the number of the one whose arguments it writes."""

    async def token_ids(self, text: str) -> list[int]:
        """Of a text in the format's markup."""


class ToolTurn:
    """One answer; its events are as those of one request.

    It gives what a part gives, with texts as calls where they are, and one Accepted and one
    Finished in place of all.
    """

    def __init__(self, plan: ToolPlan, options: GenerateOptions, parts: Parts) -> None:
        self._plan = plan
        self._options = options
        self._parts = parts
        # The prompt and what was written so far.
        self._token_ids: list[int] = []
        self._num_tokens = 0
        self._num_calls = 0
        self._accepted: Accepted | None = None
        self._first_usage: Usage | None = None
        # Of the last part.
        self._finished: Finished | None = None

    async def events(self, prompt: Prompt, token_ids: list[int]) -> AsyncGenerator[Event, None]:
        """`prompt`: what a first text reads, the same as `token_ids`."""
        self._token_ids = list(token_ids)
        if not self._plan.is_forced:
            async for event in self._text(prompt):
                yield event
        while self._plan.is_forced or self._calls_now:
            async for event in self._call():
                yield event
            if self._plan.is_forced or self._plan.is_single or not self._is_complete:
                break
            await self._write("}\n</tool_call>")
            async for event in self._text(list(self._token_ids)):
                yield event
        yield self._end()

    @property
    def _calls_now(self) -> bool:
        """A text has ended where a call begins."""
        return self._finished is not None and self._finished.matched_stop == CALL

    @property
    def _is_complete(self) -> bool:
        """The last part ended by itself, and there is room for another one."""
        finished = self._finished
        return finished is not None and finished.finish_reason is FinishReason.STOP

    async def _text(self, prompt: Prompt) -> AsyncGenerator[Event, None]:
        options: Any = {**self._options, "stop": [*self._options.get("stop", ()), CALL]}
        if self._accepted is None:
            options["parse_output"] = True
        else:
            options.pop("min_new_tokens", None)
        begins = self._accepted is not None
        async for event in self._part(prompt, options, None):
            if isinstance(event, Delta) and begins and event.text:
                # Line breaks between calls are the format's.
                text = event.text.lstrip("\n")
                begins = not text
                event = replace(event, text=text)
            yield event

    async def _call(self) -> AsyncGenerator[Event, None]:
        opening = "" if self._calls_now else CALL
        tools = self._plan.tools
        chosen = 0
        if len(tools) == 1:
            await self._write(f"{opening}\n{_head(tools[0][1])}")
        else:
            await self._write(f"{opening}\n")
            heads = [_head(tool) for _, tool in tools]
            head = ""
            async for event in self._part(
                list(self._token_ids), self._constrained(choice=heads), None
            ):
                if isinstance(event, Delta):
                    head += event.text
                    event = replace(event, text="")
                yield event
            if not self._is_complete:
                return
            chosen = heads.index(head)
        async for event in self._arguments(*tools[chosen]):
            yield event

    async def _arguments(self, number: int, tool: Tool) -> AsyncGenerator[Event, None]:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        first = ToolCallDelta(index, f"call_{index}", tool.name, "")
        if not self._has_room:
            assert self._finished is not None
            self._finished = replace(self._finished, finish_reason=FinishReason.LENGTH)
            return
        options = self._constrained(json_schema=dict(tool.parameters or ANY_OBJECT))
        async for event in self._part(list(self._token_ids), options, number):
            if isinstance(event, Delta):
                piece = replace(first, arguments_json=event.text)
                event = replace(event, text="", tool_calls=(piece,))
                first = ToolCallDelta(index, "", "", "")
            yield event

    async def _part(
        self, prompt: Prompt, options: Any, tool: int | None
    ) -> AsyncGenerator[Event, None]:
        """A request's events, Finished left out, counted on from those before."""
        options = dict(options)
        limit = self._options.get("max_new_tokens")
        if limit is not None:
            options["max_new_tokens"] = limit - self._num_tokens
        if self._accepted is not None:
            options.pop("prompt_logprobs", None)
        begin = self._num_tokens
        async for event in self._parts.part(prompt, options, tool):
            match event:
                case Delta():
                    self._token_ids += event.token_ids
                    self._num_tokens += len(event.token_ids)
                    yield replace(event, first_token_index=begin + event.first_token_index)
                case Accepted():
                    if self._accepted is None:
                        self._accepted = event
                        yield event
                case Finished():
                    self._finished = event
                    if self._first_usage is None:
                        self._first_usage = event.usage
                case _:
                    yield event

    def _constrained(self, **constraint: Any) -> dict[str, Any]:
        kept = {name: value for name, value in self._options.items() if name not in _OF_TEXT}
        return {**kept, **constraint}

    async def _write(self, text: str) -> None:
        """Into the answer, by the gateway."""
        self._token_ids += await self._parts.token_ids(text)

    @property
    def _has_room(self) -> bool:
        limit = self._options.get("max_new_tokens")
        return limit is None or self._num_tokens < limit

    def _end(self) -> Finished:
        finished, first = self._finished, self._first_usage
        assert finished is not None
        assert first is not None
        usage = Usage(first.prompt_tokens, self._num_tokens, first.cached_tokens)
        return replace(finished, usage=usage)


def _head(tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
