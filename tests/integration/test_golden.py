"""The whole chain against golden tokens of a real model (made with transformers, float32)."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import assert_close

from slotwise.v1 import inference_pb2 as pb

GOLDEN = json.loads(
    (Path(__file__).resolve().parent.parent / "golden/smollm2-greedy.json").read_text()
)
CASES = GOLDEN["cases"]
# Where the two best logits are closer than this, another summation order may tip the choice.
DECISIVE_GAP = 0.01
NUM_BEST = len(CASES[0]["logprobs"][0]["best"])


def case_id(case: dict) -> str:
    return f"{case['kind']}-{case['prompt'][:20]!r}"


def sampling_of(case: dict) -> pb.SamplingParams:
    wanted = dict(case.get("sampling", {}))
    biases = {int(token_id): bias for token_id, bias in wanted.pop("logit_bias", {}).items()}
    return pb.SamplingParams(temperature=0, logit_bias=biases, **wanted)


def golden_request(case: dict, **options: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=sampling_of(case), max_new_tokens=len(case["token_ids"]), **options
    )
    if case["kind"] == "chat":
        request.chat.messages.add(role="user", content=case["prompt"])
    else:
        request.text = case["prompt"]
    return request


def binding_ids(case: dict) -> list[int]:
    """The ids up to the first choice that is too close to call."""
    close = [i for i, gap in enumerate(case["top1_gap"]) if gap < DECISIVE_GAP]
    return case["token_ids"][: close[0] if close else None]


def test_all_cases_are_there():
    assert len(CASES) == 12
    assert sum(len(binding_ids(case)) for case in CASES) > 400


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_tokens_of_a_real_model(demo_server, case):
    got = demo_server.collect(golden_request(case))
    assert got.token_ids == case["token_ids"]
    assert got.text == case["text"]
    assert got.accepted.prompt_tokens == len(case["prompt_token_ids"])
    assert got.finished.usage.completion_tokens == len(case["token_ids"])
    stopped = case["token_ids"][-1] == GOLDEN["eos_token_id"]
    assert got.finished.finish_reason == (
        pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH
    )


@pytest.mark.parametrize("case", GOLDEN["adjusted_cases"], ids=case_id)
def test_penalties_and_bias(demo_server, case):
    """As transformers' own processors have them, in this order; each changes the answer."""
    assert demo_server.collect(golden_request(case)).token_ids == case["token_ids"]
    plain = next(one for one in CASES if one["prompt"] == case["prompt"])
    assert case["token_ids"] != plain["token_ids"]


@pytest.mark.parametrize("case", [*CASES, *GOLDEN["adjusted_cases"]], ids=case_id)
def test_logprobs(demo_server, case):
    """Of tokens by decode, and of the same tokens as a prompt; the model's, before the sampling."""
    got = demo_server.collect(golden_request(case, logprobs=NUM_BEST))
    check_logprobs(got.logprobs, case)
    prompt = pb.TokenIds(ids=[*case["prompt_token_ids"], *case["token_ids"]])
    asked = pb.GenerateRequest(token_ids=prompt, max_new_tokens=1, prompt_logprobs=NUM_BEST)
    of_prompt = demo_server.collect(asked).prompt_logprobs
    check_logprobs(of_prompt[-len(case["token_ids"]) :], case)


def check_logprobs(found: list[pb.TokenLogprobs], case: dict) -> None:
    for token_id, one, wanted in zip(case["token_ids"], found, case["logprobs"], strict=True):
        assert one.token.token_id == token_id
        values = [one.token.logprob, *(best.logprob for best in one.best)]
        wanted_values = torch.tensor([wanted["token"], *wanted["best"]])
        assert_close(torch.tensor(values), wanted_values, "golden_logprobs")
        # Of two that are as good as equal either may be first.
        apart = all(a - b > DECISIVE_GAP for a, b in itertools.pairwise(wanted["best"]))
        if apart:
            assert [best.token_id for best in one.best] == wanted["best_ids"]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_prompt_ids(demo_server, case):
    if case["kind"] == "chat":
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=case["prompt"])])
        rendered = demo_server.stub.RenderChat(pb.RenderChatRequest(chat=chat))
        assert rendered.text == case["rendered"]
        assert list(rendered.token_ids) == case["prompt_token_ids"]
    else:
        tokens = demo_server.stub.Tokenize(pb.TokenizeRequest(text=case["prompt"]))
        assert list(tokens.token_ids) == case["prompt_token_ids"]


def test_all_cases_at_once(demo_server):
    """Twelve requests on eight slots: four wait, neighbours join and leave."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        answers = list(pool.map(demo_server.collect, map(golden_request, CASES)))
    for case, got in zip(CASES, answers, strict=True):
        assert got.token_ids == case["token_ids"], case["prompt"]
