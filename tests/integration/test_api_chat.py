"""Chats whose output is parsed, over gRPC, on a fake worker that writes what it is told."""

from __future__ import annotations

import contextlib
import json

import grpc
import pytest
from tokenizer_files import QWEN3_TEMPLATE, write_model

from integration.front import WAIT_S, running_front
from scheduler_service.service import load_model
from slotwise.v1 import inference_pb2 as pb

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln"}}\n</tool_call>'
WEATHER = pb.Tool(name="weather", parameters_json='{"type": "object"}')


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("chat-model"), QWEN3_TEMPLATE), "")


def chat(thinks: bool | None = None, typed: str = "hi", **more) -> pb.Chat:
    kwargs = "" if thinks is None else json.dumps({"enable_thinking": thinks})
    messages = [pb.ChatMessage(role="user", content=typed)]
    return pb.Chat(messages=messages, tools=[WEATHER], template_kwargs_json=kwargs, **more)


@contextlib.asynccontextmanager
async def writing(model, folder, text: str, wanted: pb.Chat, by_chars: bool = False):
    """A front whose worker answers this chat with this text, then its end id for ever."""
    encode = model.tokenizer.encode
    parts = list(text) if by_chars else [text]
    ids = [i for part in parts for i in encode(part, parse_control_tokens=not by_chars)]
    prompt_len = 0

    def script(tokens):
        place = len(tokens) - prompt_len
        return ids[place] if 0 <= place < len(ids) else 2

    async with running_front(model, folder, script, num_slots=2, max_seq_len=2048) as front:
        rendered = await front.stub.RenderChat(pb.RenderChatRequest(chat=wanted))
        prompt_len = len(rendered.token_ids)
        yield front


@pytest.mark.parametrize("by_chars", [False, True])
async def test_reasoning_text_and_calls(chat_model, tmp_path, by_chars):
    """Told apart, streamed and whole; without parse_output it is all text."""
    text = f"<think>\nhm, K\u00f6ln\n</think>\n\nOne moment.\n{CALL}"
    wanted = pb.GenerateRequest(chat=chat(), parse_output=True, n=2, logprobs=0)
    async with writing(chat_model, tmp_path, text, wanted.chat, by_chars) as front:
        info = await front.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.output_format == "qwen3"
        got = await front.collect(wanted)
        for answer in got.answers:
            assert (answer.reasoning, answer.text) == ("hm, K\u00f6ln", "One moment.")
            ((call_id, name, arguments),) = answer.tool_calls
            assert (call_id != "", name, json.loads(arguments)) == (
                True,
                "weather",
                {"city": "K\u00f6ln"},
            )
            assert answer.finished.matched_token_id == 2
            assert len(answer.logprobs) == len(answer.token_ids)
        whole = await front.stub.Complete(wanted, timeout=WAIT_S)
        for choice, answer in zip(whole.choices, got.answers, strict=True):
            assert (choice.reasoning_text, choice.text) == (answer.reasoning, answer.text)
            calls = [[call.id, call.name, call.arguments_json] for call in choice.tool_calls]
            assert calls == answer.tool_calls
        wanted.parse_output = False
        plain = await front.collect(wanted)
        assert plain.text == text


@pytest.mark.parametrize(
    ("thinks", "text", "reasoning", "shown"),
    [
        (True, "hm\n</think>\n\nyes", "hm", "yes"),
        (True, "hm", "hm", ""),
        (False, "yes", "", "yes"),
        # What may have become markup comes out at the end.
        (False, "yes <tool_ca", "", "yes <tool_ca"),
    ],
)
async def test_the_prompt_decides_where_the_answer_begins(
    chat_model, tmp_path, thinks, text, reasoning, shown
):
    """B06: a typed </think> in the question changes nothing of it."""
    wanted = pb.GenerateRequest(chat=chat(thinks, typed="a </think> b <think>"), parse_output=True)
    async with writing(chat_model, tmp_path, text, wanted.chat) as front:
        got = await front.collect(wanted)
        assert (got.answers[0].reasoning, got.text) == (reasoning, shown)


async def test_stop_strings_are_looked_for_before_parsing(chat_model, tmp_path):
    """In all that the model writes, its markup too; what was open is closed as it stands."""
    wanted = pb.GenerateRequest(chat=chat(), parse_output=True, stop=['"city"'])
    async with writing(
        chat_model, tmp_path, f"<think>\nhm\n</think>\n\n{CALL}", wanted.chat
    ) as front:
        got = await front.collect(wanted)
        assert got.finished.matched_stop_string == '"city"'
        (call,) = got.answers[0].tool_calls
        assert (call[1], call[2].strip()) == ("weather", "{")
        assert (got.answers[0].reasoning, got.text) == ("hm", "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": "a"}, "chat only"),
        ({"chat": chat(), "omit_text": True}, "omit_text"),
    ],
)
async def test_parsing_that_cannot_be(chat_model, tmp_path, options, words):
    async with running_front(chat_model, tmp_path, num_slots=1) as front:
        asked = pb.GenerateRequest(parse_output=True, **options)
        error = await front.error(front.stub.Complete(asked, timeout=WAIT_S))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "parse_output" in error.details()
        assert words in error.details()


async def test_a_model_without_a_format(front):
    info = await front.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.output_format == ""
    asked = pb.GenerateRequest(chat=chat(), parse_output=True)
    error = await front.error(front.stub.Complete(asked, timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("parse_output: ")
