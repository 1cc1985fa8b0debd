"""What goes into a request and what comes back, as plain values.

Field names and meanings are those of `protos/slotwise/v1/inference.proto`; the comments there are
the reference. Durations are integers in nanoseconds, as the suffix says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypedDict

from .info import Setup


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that a model asked for; `arguments_json` is JSON text as it wrote it."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON Schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is "system", "user", "assistant" or "tool".

    `tool_call_id` of a tool's message names the call that it answers.
    """

    role: str
    content: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt made of messages, rendered with the checkpoint's chat template.

    `template_kwargs` are extra variables for the template and must be what JSON can hold.
    """

    messages: Sequence[Message]
    omit_generation_prompt: bool = False
    template_kwargs: Mapping[str, object] | None = None
    tools: Sequence[Tool] = ()

    @classmethod
    def of(
        cls,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, object] | None = None,
    ) -> "Chat":
        """A question, or a conversation so far, after an optional system message."""
        turns = [Message("user", messages)] if isinstance(messages, str) else list(messages)
        if system is not None:
            turns.insert(0, Message("system", system))
        return cls(turns, template_kwargs=template_kwargs, tools=tools)


# Raw text, token ids, or chat messages.
Prompt: TypeAlias = str | Sequence[int] | Chat


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `complete`, `chat`; left out is the server's default.

    At most one of `json_schema`, `json_object`, `regex`, `grammar` and `choice`; a schema may be
    given as JSON text or as what JSON can hold.
    """

    request_id: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    max_new_tokens: int
    min_new_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    parse_control_tokens: bool
    omit_text: bool
    logprobs: int
    prompt_logprobs: int
    json_schema: str | Mapping[str, object]
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]
    n: int
    cache_salt: str
    parse_output: bool
    attach_window_ms: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of a stream: the request is valid and queued.

    `is_journaled`: it goes on after the server's death and restart. `num_choices`: how many answers
    come; 0 when the server does not tell.
    """

    request_id: str
    prompt_tokens: int
    seed: int
    queue_position: int
    is_journaled: bool = False
    num_choices: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and its place in the order, from 1.

    `text` is its bytes in the output; a character may be spread over several tokens.
    """

    token_id: int
    logprob: float
    rank: int
    text: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token that came, and the most likely ones in its place, the likeliest first."""

    token: TokenLogprob
    best: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens from `first_token_index` on; before the first Delta."""

    request_id: str
    first_token_index: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of a tool call: the first part has `id` and `name`, all have a piece of the arguments.

    `index` is that of the call in its answer.
    """

    index: int
    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and the text they complete; never cumulative.

    `index` is that of the choice, `first_token_index` counts its tokens before `token_ids[0]`.
    `logprobs` holds one entry for each of `token_ids` where they were asked for.
    """

    request_id: str
    index: int
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning_text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class FinishReason(StrEnum):
    """Why generation ended. UNSPECIFIED stands for a reason this client does not know."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations measured in the scheduler."""

    queue_ns: int
    prefill_ns: int
    decode_ns: int
    time_to_first_token_ns: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a choice. `matched_stop` is the stop string or the id that matched."""

    request_id: str
    index: int
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings


Event: TypeAlias = Accepted | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer, whole."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    reasoning_text: str
    tool_calls: tuple[ToolCall, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to a prompt; `text`, `token_ids` and `finished` are those of the first."""

    request_id: str
    accepted: Accepted
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first answer."""
        return self.choices[0].token_ids

    @property
    def finished(self) -> Finished:
        """Of the first answer."""
        return self.choices[0].finished


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt a chat becomes."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """What an answer was when it ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What was kept of a request; `request` is the GenerateRequest in its JSON form."""

    request_id: str
    request: Mapping[str, object]
    prompt_token_ids: tuple[int, ...]
    seed: int
    setup: Setup
    answers: tuple[RecordedAnswer, ...]
    accepted_unix_ns: int
