"""What goes into a request and what comes back, as plain values.

Field names and meanings are those of `protos/slotwise/v1/inference.proto`; the comments there are
the reference. Durations are integers in nanoseconds, as the suffix says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypedDict


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt made of messages, rendered with the checkpoint's chat template.

    `template_kwargs` are extra variables for the template and must be what JSON can hold.
    """

    messages: Sequence[Message]
    omit_generation_prompt: bool = False
    template_kwargs: Mapping[str, object] | None = None

    @classmethod
    def of(cls, messages: str | Sequence[Message], *, system: str | None = None) -> "Chat":
        """A question, or a conversation so far, after an optional system message."""
        turns = [Message("user", messages)] if isinstance(messages, str) else list(messages)
        return cls(turns if system is None else [Message("system", system), *turns])


# Raw text, token ids, or chat messages.
Prompt: TypeAlias = str | Sequence[int] | Chat


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `complete`, `chat`; left out is the server's default."""

    request_id: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_new_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    parse_control_tokens: bool
    omit_text: bool


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of a stream: the request is valid and queued."""

    request_id: str
    prompt_tokens: int
    seed: int
    queue_position: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and the text they complete; never cumulative.

    `first_token_index` counts the generated tokens before `token_ids[0]`.
    """

    request_id: str
    index: int
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str


class FinishReason(StrEnum):
    """Why generation ended. UNSPECIFIED stands for a reason this client does not know."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations measured in the scheduler."""

    queue_ns: int
    prefill_ns: int
    decode_ns: int
    time_to_first_token_ns: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a stream. `matched_stop` is the stop string or the end id that matched."""

    request_id: str
    index: int
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings


Event: TypeAlias = Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    accepted: Accepted
    finished: Finished


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt a chat becomes."""

    text: str
    token_ids: tuple[int, ...]
