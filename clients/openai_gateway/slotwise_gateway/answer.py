"""What the answers of both routes share: names, counts, how a choice ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slotwise_client import Accepted, Delta, Finished, FinishReason, PromptLogprobs

from .errors import cancelled
from .written import dumped


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands around the choices: the same in each chunk."""

    answer_id: str
    kind: str
    # In seconds of the Unix epoch.
    created: int
    model: str
    fingerprint: str

    def as_chunk(self) -> Envelope:
        """Of the chunks of a chat, which are of a kind of their own."""
        return replace(self, kind=f"{self.kind}.chunk")

    def head(self) -> str:
        """The start of a JSON object, up to its first choice."""
        fields = {
            "id": self.answer_id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        return dumped(fields)[:-1] + ',"choices":['


class Usage:
    """Tokens of all answers; a prompt counts once, whatever the number of its answers."""

    def __init__(self) -> None:
        self._prompt = 0
        self._cached = 0
        self._completion = 0

    def add(self, finished: Finished, *, is_prompt_only: bool = False) -> None:
        """A choice has ended."""
        if finished.index == 0:
            self._prompt += finished.usage.prompt_tokens
            self._cached += finished.usage.cached_tokens
        if not is_prompt_only:
            self._completion += finished.usage.completion_tokens

    def fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def finish_reason(finished: Finished, *, has_calls: bool) -> str:
    """As OpenAI has it; ApiError when somebody cancelled the request by its id."""
    if finished.finish_reason is FinishReason.CANCELLED:
        raise cancelled()
    if finished.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


class Stream(Protocol):
    """Writes the events of a streamed answer; `prompt` counts the prompts of the request."""

    def begin(self, prompt: int, accepted: Accepted) -> bytes:
        """What comes before any token."""

    def prompt_logprobs(self, prompt: int, part: PromptLogprobs) -> bytes:
        """Only where the prompt is echoed with them."""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """More of a choice. Empty when there is nothing to tell."""

    def finish(self, prompt: int, finished: Finished) -> bytes:
        """A choice has ended; ApiError."""

    def end(self) -> bytes:
        """Behind all choices."""


class Whole(Protocol):
    """Gathers an answer and writes it at once; ApiError as of Stream."""

    def begin(self, prompt: int, accepted: Accepted) -> None: ...

    def prompt_logprobs(self, prompt: int, part: PromptLogprobs) -> None: ...

    def delta(self, prompt: int, delta: Delta) -> None: ...

    def finish(self, prompt: int, finished: Finished) -> None: ...

    def pieces(self) -> Iterator[str]:
        """The JSON of the response."""


def whole_json(
    envelope: Envelope, choices: Iterable[str], usage: Usage, more: str = ""
) -> Iterator[str]:
    """A response; `more`: fields behind the usage, each after a comma."""
    yield envelope.head()
    for number, choice in enumerate(choices):
        yield ("," if number else "") + choice
    yield f'],"usage":{dumped(usage.fields())}{more}}}'


def usage_chunk(envelope: Envelope, usage: Usage) -> bytes:
    """The last chunk where it is asked for."""
    return f'data: {envelope.head()}],"usage":{dumped(usage.fields())}}}\n\n'.encode()


DONE = b"data: [DONE]\n\n"
