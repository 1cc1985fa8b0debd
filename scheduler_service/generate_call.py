"""What a caller asked for, as it came: plain values, None where unset, nothing checked yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextInput:
    """A raw prompt."""

    text: str
    parse_control_tokens: bool = False


@dataclass(frozen=True, slots=True)
class IdsInput:
    """A prompt as token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    # None renders as absent.
    content: str | None = None


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Messages for the chat template. template_kwargs_json: a JSON object, or "" for none."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    template_kwargs_json: str = ""


Input = TextInput | IdsInput | ChatInput


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

    @property
    def is_chat(self) -> bool:
        """The output is a turn of its own, not the continuation of a text."""
        return isinstance(self.prompt, ChatInput)
