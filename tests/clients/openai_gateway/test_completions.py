"""What becomes of the body of a completion."""

from __future__ import annotations

import pytest
from clients.openai_gateway.test_chat import INFO

from slotwise_gateway.completions import read_completion
from slotwise_gateway.errors import ApiError


def read(**fields):
    return read_completion({"model": "m", "prompt": "p", **fields}, INFO)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_prompts(prompt, prompts):
    assert read(prompt=prompt).prompts == prompts


def test_a_bare_completion():
    job = read()
    assert job.options == {"max_new_tokens": 16}
    assert not job.looks.echo
    assert not job.looks.logprobs


def test_looks():
    job = read(
        stream=True,
        stream_options={"include_usage": True},
        logprobs=0,
        echo=True,
        n=2,
        best_of=2,
        return_token_ids=True,
        user="u",
        stop="s",
        seed=-2,
    )
    assert job.options == {
        "max_new_tokens": 16,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "n": 2,
        "stop": ["s"],
        "seed": (1 << 64) - 2,
    }
    looks = job.looks
    assert all((looks.streams, looks.include_usage, looks.logprobs, looks.echo, looks.token_ids))
    assert not looks.prompt_logprobs
    assert (job.user, job.told_stops) == ("u", {"s"})
    assert job.names.of("prompt_logprobs") == "logprobs"


def test_prompt_logprobs_by_their_own_name():
    job = read(prompt_logprobs=3)
    assert job.looks.prompt_logprobs
    assert job.options["prompt_logprobs"] == 3
    assert job.names.of("prompt_logprobs") == "prompt_logprobs"


def test_b15_no_tokens():
    """One is generated, and left out: only with echo is there anything to answer then."""
    job = read(max_tokens=0, echo=True)
    assert job.options["max_new_tokens"] == 1
    assert job.looks.is_prompt_only
    with pytest.raises(ApiError) as raised:
        read(max_tokens=0)
    assert raised.value.param == "max_tokens"
    assert not read(max_tokens=1).looks.is_prompt_only


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"structured_outputs": {}}, "structured_outputs"),
    ],
)
def test_what_does_not_go_together(fields, param):
    with pytest.raises(ApiError) as raised:
        read(**fields)
    assert raised.value.param == param


def test_constraints():
    job = read(structured_outputs={"regex": "a"})
    assert job.options == {"max_new_tokens": 16, "regex": "a"}
    assert not job.is_rendered
    assert job.names.of("regex") == "structured_outputs.regex"
