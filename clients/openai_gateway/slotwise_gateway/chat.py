"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from slotwise_client import Chat, Message, ModelInfo, Tool, ToolCall

from .errors import Names, invalid
from .fields import Route, read_object
from .job import (
    Job,
    Looks,
    check_stream_options,
    check_tools_are_known,
    common_options,
    include_usage,
    structured_output,
    told_stops,
)
from .tool_turn import ToolPlan

# What ends a call in the formats that are known.
END_CALL: Final = "</tool_call>"


def read_chat(body: dict[str, Any], info: ModelInfo) -> Job:
    """ApiError for the first field that cannot be."""
    values = read_object(Route.CHAT, "", "", body)
    check_stream_options(values)
    tools, plan = _tools(values, info)
    options = common_options(values)
    renamed = _limit(values, options)
    if values.get("logprobs"):
        options["logprobs"] = values.get("top_logprobs", 0)
    elif "top_logprobs" in values:
        raise invalid("top_logprobs", "needs logprobs; set it to true, or leave this out")
    constraint, names = _constraint(values, bool(tools))
    options.update(constraint)  # type: ignore[typeddict-item]
    chat = Chat(
        messages=tuple(_message(index, turn) for index, turn in enumerate(values["messages"])),
        omit_generation_prompt=not values.get("add_generation_prompt", True),
        template_kwargs=_template_kwargs(values, renamed),
        tools=tuple(tools),
    )
    knows_format = bool(info.output_format)
    is_rendered = knows_format and bool(constraint)
    if knows_format and not is_rendered and plan is None:
        options["parse_output"] = True
    if plan is not None and options.get("n", 1) > 1:
        raise invalid(
            "n",
            "is 1 at most where a call is forced or strict; send as many requests",
            code="unsupported_value",
        )
    if tools and plan is None and not values.get("parallel_tool_calls", True):
        options["stop"] = [*options.get("stop", ()), END_CALL]
    looks = Looks(
        streams=values.get("stream", False),
        include_usage=include_usage(values),
        logprobs=bool(values.get("logprobs")),
        token_ids=values.get("return_token_ids", False),
        prompt_logprobs="prompt_logprobs" in values,
    )
    return Job(
        prompts=(chat,),
        options=options,
        looks=looks,
        names=Names({"logprobs": "top_logprobs", **renamed, **names}),
        user=values.get("user", "") or values.get("safety_identifier", ""),
        cache_key=values.get("prompt_cache_key"),
        is_rendered=is_rendered,
        hides_calls=not tools and "parse_output" in options,
        plan=plan,
        told_stops=told_stops(values),
    )


def _limit(values: Mapping[str, Any], options: Any) -> dict[str, str]:
    """Sets the limit of tokens; by which name it came."""
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise invalid(
            "max_tokens",
            f"is {old}, and max_completion_tokens, its new name, is {new}; leave one out",
        )
    limit = old if new is None else new
    if limit is not None:
        options["max_new_tokens"] = limit
    return {"max_new_tokens": "max_tokens" if new is None else "max_completion_tokens"}


def _template_kwargs(
    values: Mapping[str, Any], renamed: dict[str, str]
) -> dict[str, object] | None:
    kwargs = dict(values.get("chat_template_kwargs", {}))
    if "reasoning_effort" in values:
        if "reasoning_effort" in kwargs:
            raise invalid("reasoning_effort", "is in chat_template_kwargs too; leave one out")
        if not kwargs:
            renamed["chat.template_kwargs_json"] = "reasoning_effort"
        kwargs["reasoning_effort"] = values["reasoning_effort"]
    return kwargs or None


# Messages


def _message(index: int, turn: Mapping[str, Any]) -> Message:
    where, role = f"messages.{index}", turn["role"]
    is_assistant = role == "assistant"
    for name in ("tool_calls", "reasoning_content"):
        if name in turn and not is_assistant and turn[name]:
            raise invalid(f"{where}.{name}", f"is an assistant's, and the role is {role!r}")
    if "content" not in turn and not is_assistant:
        raise invalid(f"{where}.content", "is missing")
    if role == "tool" and "tool_call_id" not in turn:
        raise invalid(f"{where}.tool_call_id", "is missing: which call does the message answer?")
    return Message(
        role="system" if role == "developer" else role,
        content=turn.get("content"),
        tool_calls=tuple(_call(call) for call in turn.get("tool_calls", ())),
        tool_call_id=turn.get("tool_call_id"),
        name=turn.get("name"),
        reasoning_content=turn.get("reasoning_content"),
    )


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    return ToolCall(call.get("id", ""), function["name"], function.get("arguments", ""))


# Tools


def _tools(values: Mapping[str, Any], info: ModelInfo) -> tuple[list[Tool], ToolPlan | None]:
    """Those for the prompt; how their calls are to be written, unless the model may as it likes."""
    functions = [tool["function"] for tool in values.get("tools", ())]
    choice = values.get("tool_choice", "auto" if functions else "none")
    if not functions and choice not in ("none", "auto"):
        raise invalid("tool_choice", "needs tools; give them, or leave this out")
    _refuse_twins(functions)
    if not functions or choice == "none":
        return [], None
    check_tools_are_known(info)
    tools = [
        Tool(function["name"], function.get("description"), function.get("parameters"))
        for function in functions
    ]
    numbered = list(enumerate(tools))
    if choice == "required":
        return tools, ToolPlan(tuple(numbered), is_forced=True, is_single=True)
    if choice != "auto":
        name = choice["function"]["name"]
        named = tuple(each for each in numbered if each[1].name == name)
        if not named:
            raise invalid("tool_choice.function.name", f"{name[:200]!r} is none of the tools")
        return tools, ToolPlan(named, is_forced=True, is_single=True)
    if not any(function.get("strict") for function in functions):
        return tools, None
    kept = tuple(
        (number, tool if functions[number].get("strict") else replace(tool, parameters=None))
        for number, tool in numbered
    )
    is_single = not values.get("parallel_tool_calls", True)
    return tools, ToolPlan(kept, is_forced=False, is_single=is_single)


def _refuse_twins(functions: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for index, function in enumerate(functions):
        name = function["name"]
        if name in seen:
            raise invalid(f"tools.{index}.function.name", f"{name!r} is there twice")
        seen.add(name)


# Structured output


def _constraint(
    values: Mapping[str, Any], has_tools: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The constraint of a request, and how its errors are to be named."""
    constraint, names = structured_output(values)
    wanted = values.get("response_format", {"type": "text"})
    kind, path = wanted["type"], "response_format.json_schema"
    if kind != "json_schema" and "json_schema" in wanted:
        raise invalid(path, f"is there, and the type is {kind!r}")
    if kind == "json_schema" and "json_schema" not in wanted:
        raise invalid(path, "is missing")
    if kind != "text":
        if constraint:
            raise invalid(
                "response_format", "is there, and so is structured_outputs; leave one out"
            )
        if kind == "json_object":
            constraint, names = {"json_object": True}, {"json_object": "response_format"}
        else:
            constraint = {"json_schema": wanted["json_schema"]["schema"]}
            names = {"json_schema": f"{path}.schema"}
    if constraint and has_tools:
        name = "response_format" if kind != "text" else "structured_outputs"
        raise invalid(
            name,
            "is not supported together with tools that may be called; set tool_choice to none, or "
            "leave one out",
            code="unsupported_value",
        )
    return constraint, names
