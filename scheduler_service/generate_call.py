"""What a caller asked for, as it came: plain values, None where unset, nothing checked yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextInput:
    """A raw prompt."""

    text: str
    parse_control_tokens: bool = False


@dataclass(frozen=True, slots=True)
class IdsInput:
    """A prompt as token ids."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments_json: a JSON object, or "" for an empty one."""

    id: str
    name: str
    arguments_json: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What is None, or empty, renders as absent."""

    role: str
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters_json: a JSON Schema object, or "" for none."""

    name: str
    description: str | None = None
    parameters_json: str = ""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Messages for the chat template. template_kwargs_json: a JSON object, or "" for none."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    template_kwargs_json: str = ""
    tools: tuple[Tool, ...] = ()


Input = TextInput | IdsInput | ChatInput


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """What the output must be. `kind` is the field's name in GenerateRequest: "json_schema",
    "json_object" (source ""), "regex", "grammar", or "choice" (its texts in `choices`)."""

    kind: str
    source: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A GenerateRequest of the public API, free of protobuf."""

    prompt: Input
    request_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    omit_text: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    # (token id, bias) pairs, ids ascending.
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: ConstraintSpec | None = None
    n: int | None = None
    cache_salt: str | None = None
    parse_output: bool = False
    # How long the call goes on without a reader.
    attach_window_s: float = 0.0

    @property
    def is_chat(self) -> bool:
        """The output is a turn of its own, not the continuation of a text."""
        return isinstance(self.prompt, ChatInput)
