"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Any, Final

from slotwise_client import ModelInfo

from .errors import Names, invalid
from .fields import Route, read_object
from .job import (
    Job,
    Looks,
    check_stream_options,
    common_options,
    include_usage,
    structured_output,
    told_stops,
)

# As OpenAI has it.
MAX_TOKENS: Final = 16


def read_completion(body: dict[str, Any], info: ModelInfo) -> Job:
    """ApiError for the first field that cannot be."""
    values = read_object(Route.COMPLETIONS, "", "", body)
    check_stream_options(values)
    echoes, max_tokens = values.get("echo", False), values.get("max_tokens", MAX_TOKENS)
    _check(values, max_tokens)
    options = common_options(values)
    options["max_new_tokens"] = max(1, max_tokens)
    renamed = {}
    if "logprobs" in values:
        options["logprobs"] = values["logprobs"]
        if echoes:
            if "prompt_logprobs" in values:
                raise invalid(
                    "prompt_logprobs", "is what logprobs with echo asks for; leave one out"
                )
            options["prompt_logprobs"] = values["logprobs"]
            renamed["prompt_logprobs"] = "logprobs"
    constraint, names = structured_output(values)
    options.update(constraint)  # type: ignore[typeddict-item]
    prompts = values["prompt"]
    looks = Looks(
        streams=values.get("stream", False),
        include_usage=include_usage(values),
        logprobs="logprobs" in values,
        token_ids=values.get("return_token_ids", False),
        prompt_logprobs="prompt_logprobs" in values,
        echo=echoes,
        is_prompt_only=max_tokens == 0,
    )
    return Job(
        prompts=tuple(prompts),
        options=options,
        looks=looks,
        names=Names({**renamed, **names}),
        user=values.get("user", ""),
        cache_key=values.get("prompt_cache_key"),
        told_stops=told_stops(values),
    )


def _check(values: dict[str, Any], max_tokens: int) -> None:
    if max_tokens == 0 and not values.get("echo"):
        raise invalid(
            "max_tokens", "0 asks for nothing; at least 1 is needed, or echo for the prompt alone"
        )
    best_of, n = values.get("best_of"), values.get("n", 1)
    if best_of is not None and best_of != n:
        raise invalid(
            "best_of",
            f"{best_of} is not n, which is {n}: answers are not ranked; leave it out",
            code="unsupported_value",
        )
