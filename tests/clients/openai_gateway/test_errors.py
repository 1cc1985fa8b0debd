from __future__ import annotations

import json

import grpc
import pytest

from slotwise_client import (
    AlreadyExistsError,
    CancelledError,
    DeadlineError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    PermissionDeniedError,
    QueueFullError,
    UnauthenticatedError,
    UnavailableError,
)
from slotwise_gateway.errors import ApiError, Names, from_grpc, invalid, model_not_found

CODE = grpc.StatusCode.UNKNOWN


def test_the_shape_of_a_response_and_of_an_event():
    error = ApiError(400, "é: no", kind="k", param="p", code="c")
    told = {"error": {"message": "é: no", "type": "k", "param": "p", "code": "c"}}
    assert json.loads(error.body()) == told
    assert "é".encode() in error.body()
    assert error.event() == b"data: " + error.body() + b"\n\n"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (QueueFullError("full", 1.2), 429, "rate_limit_error", "queue_full"),
        (UnavailableError("down", CODE), 503, "service_unavailable", "service_unavailable"),
        (UnauthenticatedError("who", CODE), 401, "authentication_error", "invalid_api_key"),
        (PermissionDeniedError("no", CODE), 403, "permission_error", None),
        (AlreadyExistsError("twice", CODE), 409, "invalid_request_error", "request_exists"),
        (MessageTooLargeError("large", CODE), 413, "invalid_request_error", "request_too_large"),
        (DeadlineError("late", CODE), 504, "timeout_error", "timeout"),
        (FailedPreconditionError("x", CODE), 422, "invalid_request_error", "constraint_failed"),
        (InternalError("bug", CODE), 500, "server_error", "server_error"),
        (CancelledError("gone", CODE), 500, "server_error", "server_error"),
        (InvalidArgumentError("odd"), 400, "invalid_request_error", None),
    ],
)
def test_statuses(error, status, kind, code):
    told = from_grpc(error, Names())
    assert (told.status, told.kind, told.code) == (status, kind, code)
    assert error.message in told.message


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (QueueFullError("full", 1.2), "2"),
        (QueueFullError("full"), "1"),
        (QueueFullError("full", 0.1), "1"),
        (UnavailableError("down", CODE), "1"),
    ],
)
def test_when_to_try_again(error, seconds):
    assert from_grpc(error, Names()).headers == {"Retry-After": seconds}


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("chat.messages[3].content", "messages.3.content"),
        ("chat.messages[0].tool_calls[1].name", "messages.0.tool_calls.1.function.name"),
        (
            "chat.messages[0].tool_calls[1].arguments_json",
            "messages.0.tool_calls.1.function.arguments",
        ),
        ("chat.messages", "messages"),
        ("chat.tools[2].parameters_json", "tools.2.function.parameters"),
        ("chat.tools", "tools"),
        ("chat.template_kwargs_json", "chat_template_kwargs"),
        ("sampling.temperature", "temperature"),
        ("sampling.logit_bias[7]", "logit_bias.7"),
        ("stop[1]", "stop.1"),
        ("stop_token_ids[0]", "stop_token_ids.0"),
        ("max_new_tokens", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("text", "prompt"),
        ("token_ids.ids[5]", "prompt.5"),
        ("token_ids", "prompt"),
        ("json_schema", "response_format.json_schema.schema"),
        ("json_object", "response_format"),
        ("choice.texts[2]", "structured_outputs.choice.2"),
        ("regex", "structured_outputs.regex"),
        ("grammar", "structured_outputs.grammar"),
        ("include_stop_in_output", "include_stop_str_in_output"),
        ("request_id", "x-request-id"),
        ("n", "n"),
        ("cache_salt", "cache_salt"),
    ],
)
def test_names_of_fields(field, name):
    error = InvalidArgumentError("m", (FieldViolation(field, "is bad"),))
    told = from_grpc(error, Names())
    assert (told.param, told.message) == (name, f"{name}: is bad")


def test_names_that_a_body_has_given():
    names = Names({"max_new_tokens": "max_completion_tokens", "token_ids": "prompt.4"})
    assert names.of("max_new_tokens") == "max_completion_tokens"
    assert names.of("token_ids[1]") == "prompt.4.1"
    told = names.in_text("at least 1 besides max_new_tokens and min_new_tokens")
    assert told == "at least 1 besides max_completion_tokens and min_tokens"


def test_made_ones():
    error = invalid("n", "is 0", code="c")
    assert (error.status, error.message, error.param, error.code) == (400, "n: is 0", "n", "c")
    assert model_not_found("x" * 500, "y").message.count("x") == 200
