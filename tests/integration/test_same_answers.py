"""The promise for the whole API, on a real model: an answer with its logprobs is the same alone and
in company, cold and warm, whatever its neighbours ask for."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoints import make_checkpoint
from integration.servers import Server, running_server
from integration.streams import Generation
from slotwise.v1 import inference_pb2 as pb

ADJUSTED = pb.SamplingParams(
    temperature=0.9,
    seed=11,
    frequency_penalty=0.7,
    presence_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias={20: 4.0, 30: -100.0},
)
GREEDY = pb.SamplingParams(temperature=0)
OPTIONS = [
    {"sampling": pb.SamplingParams(temperature=0.8, seed=5), "logprobs": 5},
    {"sampling": ADJUSTED, "logprobs": 2, "n": 2},
    {"sampling": GREEDY, "logprobs": 20, "prompt_logprobs": 3},
    {"sampling": ADJUSTED, "regex": "[a-h ]{5,30}", "logprobs": 1},
    {"sampling": GREEDY, "min_new_tokens": 10, "logprobs": 0},
    {"sampling": pb.SamplingParams(temperature=1.2, seed=3, top_k=9), "n": 3},
    {"sampling": ADJUSTED, "json_object": pb.JsonObject(), "max_new_tokens": 30},
    {"sampling": GREEDY, "prompt_logprobs": 0},
]
FLAGS = ("--num-slots", "6", "--max-running", "4", "--max-seq-len", "512")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "qwen3", tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def server(model):
    with running_server(model, *FLAGS) as running:
        yield running


def request(index: int, prompt_len: int | None = None) -> pb.GenerateRequest:
    length = 40 + 37 * index if prompt_len is None else prompt_len
    ids = [3 + (7 * index + place * place) % 290 for place in range(length)]
    options = {"max_new_tokens": 16, "ignore_eos": True, **OPTIONS[index]}
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **options)


def seen(got: Generation) -> list:
    """All that must be equal, to the bit."""
    answers = [
        (
            answer.token_ids,
            answer.text,
            [one.SerializeToString(deterministic=True) for one in answer.logprobs],
            answer.finished.finish_reason,
        )
        for answer in got.answers
    ]
    of_prompt = [one.SerializeToString(deterministic=True) for one in got.prompt_logprobs]
    return [answers, of_prompt]


def flush(server: Server) -> None:
    server.stub.FlushCache(pb.FlushCacheRequest())


@pytest.fixture(scope="module")
def alone(server):
    """Each on a cold cache."""
    found = []
    for index in range(len(OPTIONS)):
        flush(server)
        found.append(seen(server.collect(request(index))))
    return found


def test_the_answers_are_what_was_asked_for(server, alone):
    for index, (answers, of_prompt) in enumerate(alone):
        options = OPTIONS[index]
        assert len(answers) == options.get("n", 1)
        wants = "logprobs" in options
        assert all(len(logprobs) == (len(ids) if wants else 0) for ids, _, logprobs, _ in answers)
        num_prompt = len(request(index).token_ids.ids)
        assert len(of_prompt) == (num_prompt - 1 if "prompt_logprobs" in options else 0)
    assert re.fullmatch("[a-h ]{5,30}", alone[3][0][0][1])
    assert 30 not in alone[1][0][0][0]
    assert len({tuple(ids) for ids, *_ in alone[5][0]}) == 3


@pytest.mark.parametrize("is_warm", [False, True])
def test_in_company(server, alone, is_warm):
    """Four run, the others wait and come in as those end; then from slots that keep prefixes."""
    for _ in range(2 if is_warm else 1):
        if not is_warm:
            flush(server)
        with ThreadPoolExecutor(len(OPTIONS)) as pool:
            answers = list(pool.map(server.collect, map(request, range(len(OPTIONS)))))
        for index, got in enumerate(answers):
            assert seen(got) == alone[index], OPTIONS[index]


@pytest.mark.parametrize("index", range(len(OPTIONS)))
def test_cold_and_warm(server, alone, index):
    """A prefix of any length is reused: a longer and a shorter prompt leave theirs."""
    flush(server)
    server.collect(request(index, len(request(index).token_ids.ids) + 9))
    warm = server.collect(request(index))
    assert seen(warm) == alone[index]
    reuses = "prompt_logprobs" not in OPTIONS[index]
    cached = warm.finished.usage.cached_tokens
    assert cached == (len(request(index).token_ids.ids) - 1 if reuses else 0)
    flush(server)
    server.collect(request(index, len(request(index).token_ids.ids) // 2))
    assert seen(server.collect(request(index))) == alone[index]


def test_a_conversation_of_16_turns(server):
    """Only the new text is computed, and the answers are those of a cold server."""
    flush(server)
    turns, ids = [], [5, 6, 7]
    for turn in range(16):
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            sampling=pb.SamplingParams(temperature=0.7, seed=turn),
            max_new_tokens=8,
            ignore_eos=True,
            logprobs=3,
        )
        got = server.collect(asked)
        cached = got.finished.usage.cached_tokens
        # All but the last generated token, which was never an input, and what the user adds.
        assert cached == (len(ids) - 4 if turn else 0)
        turns.append((asked, got))
        ids = [*ids, *got.token_ids, 9, 10 + turn, 8]
    for asked, got in turns[::5]:
        flush(server)
        assert seen(server.collect(asked)) == seen(got)


def test_answers_are_those_of_their_seeds(server):
    """n answers: the first is that of one answer; all are drawn apart, all with penalties."""
    many = request(1)
    many.n = 4
    got = server.collect(many)
    assert len({tuple(answer.token_ids) for answer in got.answers}) == 4
    many.ClearField("n")
    flush(server)
    assert server.collect(many).token_ids == got.answers[0].token_ids


def test_two_ranks(model, alone):
    """The same answers alone and in company; those that are greedy are those of one rank."""
    with running_server(model, *FLAGS, "--tp", "2", "--threads", "1") as server:
        apart = []
        for index in range(len(OPTIONS)):
            flush(server)
            apart.append(server.collect(request(index)))
        with ThreadPoolExecutor(len(OPTIONS)) as pool:
            together = list(pool.map(server.collect, map(request, range(len(OPTIONS)))))
        assert [seen(got) for got in together] == [seen(got) for got in apart]
        for index in (2, 4):
            assert apart[index].token_ids == alone[index][0][0][0]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept_by_a_model_of_random_weights(server, seed):
    asked = pb.GenerateRequest(
        text="a person",
        json_schema=json.dumps(SCHEMA),
        sampling=pb.SamplingParams(temperature=1.0, seed=seed),
        max_new_tokens=300,
    )
    got = server.collect(asked)
    assert got.finished.finish_reason == pb.FINISH_REASON_STOP
    found = json.loads(got.text)
    assert set(found) == {"name", "age", "tags"}
    assert len(found["name"]) <= 8
    assert 0 <= found["age"] <= 99
    assert set(found["tags"]) <= {"x", "y"}
