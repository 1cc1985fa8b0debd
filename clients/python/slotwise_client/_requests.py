"""From plain values to request messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slotwise.v1 import inference_pb2 as pb

from .errors import FieldViolation, InvalidArgumentError
from .types import Chat, GenerateOptions, Prompt

SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request for one prompt.

    Raises TypeError for an unknown option, InvalidArgumentError for a value that its field cannot
    hold; everything else is the server's to judge.
    """
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(GenerateOptions.__annotations__)
        raise TypeError(f"unknown option {unknown[0]!r}; known are {known}")
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    for name, value in options.items():
        if name in SAMPLING:
            _set(request.sampling, name, value, "sampling.")
        else:
            _set(request, name, value)
    return request


def chat_message(chat: Chat) -> pb.Chat:
    """A chat as the protocol has it; TypeError when `template_kwargs` is not JSON."""
    message = pb.Chat(omit_generation_prompt=chat.omit_generation_prompt)
    if chat.template_kwargs is not None:
        message.template_kwargs_json = json.dumps(dict(chat.template_kwargs))
    for turn in chat.messages:
        message.messages.add(role=turn.role, content=turn.content)
    return message


def detokenize_request(token_ids: Sequence[int], keep_control_tokens: bool) -> pb.DetokenizeRequest:
    """The request for the text of some ids."""
    request = pb.DetokenizeRequest(keep_control_tokens=keep_control_tokens)
    _set(request, "token_ids", token_ids)
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(chat_message(prompt))
    else:
        # Choosing the member also when there are no ids lets the server name the empty field.
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", prompt, "token_ids.")


def _set(message: Any, name: str, value: Any, prefix: str = "") -> None:
    try:
        if hasattr(getattr(message, name), "extend"):
            _refuse_text(name, value)
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        field = prefix + name
        reason = f"{field}: {_brief(value)} is not possible ({error})"
        raise InvalidArgumentError(reason, (FieldViolation(field, str(error)),)) from error


def _refuse_text(name: str, value: Any) -> None:
    # A string is a sequence of strings: stop="END" would become three stops.
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError(f"{name} takes a sequence, not {type(value).__name__}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
