"""A request body, understood: what is to be generated, and how the answer is to look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from slotwise_client import Chat, GenerateOptions, ModelInfo, Prompt

from .errors import Names, invalid
from .routing_key import routing_key
from .tool_turn import ToolPlan

_MASK64: Final = (1 << 64) - 1

# Of a body, by the option of a GenerateRequest that they are.
_OPTIONS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_str_in_output": "include_stop_in_output",
    "min_tokens": "min_new_tokens",
    "cache_salt": "cache_salt",
    "n": "n",
    "prompt_logprobs": "prompt_logprobs",
}


@dataclass(frozen=True, slots=True)
class Looks:
    """How answers are written."""

    streams: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    # Of completions: the prompt goes first.
    echo: bool = False
    # Of completions: nothing but the prompt; the one token that is generated is left out.
    is_prompt_only: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A request to each of `prompts`, with the same options."""

    prompts: tuple[Prompt, ...]
    options: GenerateOptions
    looks: Looks
    names: Names
    # For the log: who asks, by their own words.
    user: str = ""
    # For all prompts; None: each goes where its beginning leads.
    cache_key: str | None = None
    # The chat is rendered here, and the reasoning that it may open is closed: the constraint is of
    # the answer.
    is_rendered: bool = False
    # It has no tools: what looks like a call is text.
    hides_calls: bool = False
    # How its calls are to be written, where that is not left to the model.
    plan: ToolPlan | None = None
    # What stopped an answer is told where it is one of these.
    told_stops: frozenset[str | int] = field(default_factory=frozenset)

    def routing_key(self, number: int = 0) -> str:
        """Of one of its prompts: which replica is asked."""
        salt = self.options.get("cache_salt")
        return routing_key(self.prompts[number], self.cache_key, salt)

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.options.get("n", 1)

    @property
    def chat(self) -> Chat:
        """Of a job with one."""
        (chat,) = self.prompts
        assert isinstance(chat, Chat)
        return chat


def common_options(values: Mapping[str, Any]) -> GenerateOptions:
    """What both routes have, of a body that was read."""
    found = {option: values[name] for name, option in _OPTIONS.items() if name in values}
    if "seed" in values:
        found["seed"] = values["seed"] & _MASK64
    return cast(GenerateOptions, found)


def told_stops(values: Mapping[str, Any]) -> frozenset[str | int]:
    """The stops that the caller named; the model's own end is nothing to tell."""
    return frozenset((*values.get("stop", ()), *values.get("stop_token_ids", ())))


def check_stream_options(values: Mapping[str, Any]) -> None:
    """What makes no sense together; ApiError."""
    streams = values.get("stream", False)
    if "stream_options" in values and not streams:
        raise invalid("stream_options", "is for stream alone; leave it out, or set stream")
    if "prompt_logprobs" in values and streams:
        raise invalid("prompt_logprobs", "does not come with stream; leave one out")


def include_usage(values: Mapping[str, Any]) -> bool:
    return bool(values.get("stream_options", {}).get("include_usage", False))


def structured_output(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The constraint that structured_outputs asks for, and how its errors are to be named."""
    wanted = {
        name: value
        for name, value in values.get("structured_outputs", {}).items()
        if value is not False
    }
    if "structured_outputs" not in values:
        return {}, {}
    if len(wanted) != 1:
        raise invalid(
            "structured_outputs",
            f"has {len(wanted)} constraints; one of json, regex, choice, grammar and json_object "
            "is needed",
        )
    ((name, value),) = wanted.items()
    option = "json_schema" if name == "json" else name
    path = "choice.texts" if name == "choice" else option
    return {option: value}, {path: f"structured_outputs.{name}"}


def check_tools_are_known(info: ModelInfo) -> None:
    """ApiError where the calls of this model could not be told from text."""
    if not info.output_format:
        raise invalid(
            "tools",
            f"nothing is known of how {info.name} writes calls; leave them out, or set "
            "tool_choice to none",
        )
