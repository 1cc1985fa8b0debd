"""Answers of /v1/chat/completions, as chunks and whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from slotwise_client import (
    Accepted,
    Delta,
    Finished,
    PromptLogprobs,
    ToolCallDelta,
)

from .answer import (
    DONE,
    Envelope,
    Stream,
    Usage,
    Whole,
    finish_reason,
    usage_chunk,
    whole_json,
)
from .job import Job
from .logprobs import PromptRows, chat_logprobs
from .written import dumped, encoded


def call_id(request_id: str, choice: int, index: int) -> str:
    """Of a tool call: no other answer has one like it, the same answer has it again."""
    name = f"{request_id}/{choice}/{index}".encode()
    return f"call_{hashlib.blake2s(name, digest_size=12).hexdigest()}"


class _Choice:
    """One answer as it grows: what it is, apart from how it is written."""

    def __init__(self, job: Job, request_id: str, index: int) -> None:
        self._request_id = request_id
        self._index = index
        self._told_stops = job.told_stops
        self.has_calls = False

    def call_id(self, index: int) -> str:
        return call_id(self._request_id, self._index, index)

    def ending(self, finished: Finished) -> tuple[str, str | int | None]:
        """Reason and told stop; ApiError."""
        reason = finish_reason(finished, has_calls=self.has_calls)
        stop = finished.matched_stop
        return reason, stop if stop in self._told_stops else None


class ChatStream(Stream):
    """Chunks. What stays the same around a piece of text is written once."""

    def __init__(self, job: Job, envelope: Envelope, request_id: str) -> None:
        self._looks = job.looks
        self._num_best = job.options.get("logprobs", 0)
        self._envelope = envelope
        self._usage = Usage()
        choices = range(job.num_choices)
        self._choices = [_Choice(job, request_id, index) for index in choices]
        start = f"data: {envelope.head()}"
        self._heads = [f'{start}{{"index":{index},"delta":{{' for index in choices]
        self._end = ',"usage":null}\n\n' if job.looks.include_usage else "}\n\n"
        self._tail = f'}},"logprobs":null,"finish_reason":null}}]{self._end}'
        # A delta of text alone, the same for every token.
        self._is_plain = not (job.looks.logprobs or job.looks.token_ids)

    def begin(self, prompt: int, accepted: Accepted) -> bytes:
        return "".join(
            f'{head}"role":"assistant","content":""{self._tail}' for head in self._heads
        ).encode()

    def prompt_logprobs(self, prompt: int, part: PromptLogprobs) -> bytes:
        return b""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        if self._is_plain and not delta.tool_calls and not delta.reasoning_text:
            if not delta.text:
                return b""
            head = self._heads[delta.index]
            return f'{head}"content":{encoded(delta.text)}{self._tail}'.encode()
        return self._other_delta(delta)

    def finish(self, prompt: int, finished: Finished) -> bytes:
        choice, head = self._choices[finished.index], self._heads[finished.index]
        self._usage.add(finished)
        reason, stop = choice.ending(finished)
        return (
            f'{head}}},"logprobs":null,"finish_reason":"{reason}",'
            f'"stop_reason":{dumped(stop)}}}]{self._end}'
        ).encode()

    def end(self) -> bytes:
        usage = usage_chunk(self._envelope, self._usage) if self._looks.include_usage else b""
        return usage + DONE

    def _other_delta(self, delta: Delta) -> bytes:
        choice = self._choices[delta.index]
        fields = []
        if delta.text:
            fields.append(f'"content":{encoded(delta.text)}')
        if delta.reasoning_text:
            fields.append(f'"reasoning_content":{encoded(delta.reasoning_text)}')
        if delta.tool_calls:
            choice.has_calls = True
            fields.append(f'"tool_calls":{self._calls(choice, delta.tool_calls)}')
        logprobs, ids = "null", ""
        if self._looks.logprobs and delta.logprobs:
            logprobs = dumped(chat_logprobs(delta.logprobs, self._num_best))
        if self._looks.token_ids:
            ids = f',"token_ids":{dumped(delta.token_ids)}'
        if not fields and logprobs == "null" and not (ids and delta.token_ids):
            return b""
        return (
            f"{self._heads[delta.index]}{','.join(fields)}}},"
            f'"logprobs":{logprobs},"finish_reason":null{ids}}}]{self._end}'
        ).encode()

    def _calls(self, choice: _Choice, parts: Sequence[ToolCallDelta]) -> str:
        written: list[dict[str, Any]] = []
        for part in parts:
            function: dict[str, Any] = {"arguments": part.arguments_json}
            call: dict[str, Any] = {"index": part.index}
            if part.name:
                call |= {"id": choice.call_id(part.index), "type": "function"}
                function = {"name": part.name, **function}
            written.append({**call, "function": function})
        return dumped(written)


class _WholeChoice:
    """What was gathered of a choice."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.logprobs: list[str] = []
        self.token_ids: list[int] = []
        self.reason = ""
        self.stop: str | int | None = None


class ChatWhole(Whole):
    """One response."""

    def __init__(self, job: Job, envelope: Envelope, request_id: str) -> None:
        self._looks = job.looks
        self._num_best = job.options.get("logprobs", 0)
        self._envelope = envelope
        self._usage = Usage()
        self._choices = [_Choice(job, request_id, index) for index in range(job.num_choices)]
        self._gathered = [_WholeChoice() for _ in self._choices]
        self._prompt_rows = PromptRows()

    def begin(self, prompt: int, accepted: Accepted) -> None:
        pass

    def prompt_logprobs(self, prompt: int, part: PromptLogprobs) -> None:
        self._prompt_rows.add(part.logprobs)

    def delta(self, prompt: int, delta: Delta) -> None:
        choice, gathered = self._choices[delta.index], self._gathered[delta.index]
        self._add_calls(choice, gathered, delta.tool_calls)
        gathered.text.append(delta.text)
        gathered.reasoning.append(delta.reasoning_text)
        gathered.token_ids += delta.token_ids
        if self._looks.logprobs and delta.logprobs:
            content = chat_logprobs(delta.logprobs, self._num_best)["content"]
            gathered.logprobs.append(dumped(content)[1:-1])

    def finish(self, prompt: int, finished: Finished) -> None:
        choice, gathered = self._choices[finished.index], self._gathered[finished.index]
        self._usage.add(finished)
        gathered.reason, gathered.stop = choice.ending(finished)

    def pieces(self) -> Iterator[str]:
        more = ""
        if self._looks.prompt_logprobs:
            more = f',"prompt_logprobs":{self._prompt_rows.json()}'
        return whole_json(self._envelope, self._written(), self._usage, more)

    def _written(self) -> Iterator[str]:
        for index, gathered in enumerate(self._gathered):
            logprobs = "null"
            if self._looks.logprobs:
                logprobs = f'{{"content":[{",".join(gathered.logprobs)}],"refusal":null}}'
            ids = f',"token_ids":{dumped(gathered.token_ids)}' if self._looks.token_ids else ""
            yield (
                f'{{"index":{index},"message":{dumped(self._message(gathered))},'
                f'"logprobs":{logprobs},"finish_reason":"{gathered.reason}",'
                f'"stop_reason":{dumped(gathered.stop)}{ids}}}'
            )

    def _message(self, gathered: _WholeChoice) -> dict[str, Any]:
        text, reasoning = "".join(gathered.text), "".join(gathered.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if gathered.calls:
            message["content"] = text or None
            message["tool_calls"] = list(gathered.calls.values())
        return message

    @staticmethod
    def _add_calls(choice: _Choice, gathered: _WholeChoice, parts: Sequence[ToolCallDelta]) -> None:
        for part in parts:
            choice.has_calls = True
            call = gathered.calls.setdefault(
                part.index,
                {
                    "id": choice.call_id(part.index),
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                },
            )
            call["function"]["arguments"] += part.arguments_json
