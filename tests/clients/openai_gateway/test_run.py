from __future__ import annotations

import asyncio

import pytest
from clients.openai_gateway.test_chat import read as read_a_chat
from clients.openai_gateway.test_completions import read
from clients.scripted_server import BLOCKED_S, Script, bad_field, scripted_server

from slotwise_client import Finished
from slotwise_gateway.config import Config
from slotwise_gateway.errors import ApiError, unavailable
from slotwise_gateway.run import Run
from slotwise_gateway.upstream import Upstream

TOOL = {"type": "function", "function": {"name": "f"}}
FORCED = {"tools": [TOOL], "tool_choice": "required"}


@pytest.fixture
async def upstream(served):
    made = Upstream(Config(server=served.address), lambda error: None)
    await made.check_ready()
    yield made
    await made.close()


def kinds(served) -> list[str]:
    return [type(one).__name__ for one in served.script.requests]


@pytest.mark.parametrize("job", [read(), read(prompt=["a", "b"])])
async def test_a_run_that_has_ended_asks_for_nothing(served, upstream, job):
    run = Run(upstream, upstream.client(None), job, "r")
    run.end(unavailable("why"))
    run.end(unavailable("too late"))
    assert [event async for event in run.events()] == []
    assert kinds(served) == []
    assert run.error is not None
    assert run.error.message == "why"


async def test_events_of_several_prompts_with_their_numbers(upstream):
    run = Run(upstream, upstream.client(None), read(prompt=["a", "b", "c"]), "r")
    events = [event async for event in run.events()]
    ends = [number for number, event in events if isinstance(event, Finished)]
    assert sorted(ends) == [0, 1, 2]


async def test_a_prompt_that_is_refused_ends_the_others():
    class OneIsBad(Script):
        def Generate(self, request, context):  # noqa: N802
            if request.text == "bad":
                self.first_delta.wait(BLOCKED_S)
                self.error = bad_field("text", "is bad")
            yield from super().Generate(request, context)

    with scripted_server(OneIsBad(blocked=True)) as served:
        made = Upstream(Config(server=served.address), lambda error: None)
        await made.check_ready()
        run = Run(made, made.client(None), read(prompt=["good", "bad"]), "r")
        with pytest.raises(ApiError, match="is bad") as raised:
            async for _ in run.events():
                pass
        assert raised.value.param == "prompt.1"
        assert await asyncio.to_thread(served.script.ended.wait, 30)
        await made.close()


async def test_a_forced_call_goes_on_from_the_rendered_chat(served, upstream):
    """The template of the script opens nothing, and its ids are 1 and 2."""
    run = Run(upstream, upstream.client(None), read_a_chat(**FORCED), "r")
    events = [event async for event in run.events()]
    assert isinstance(events[-1][1], Finished)
    sent = [one for one in served.script.requests if type(one).__name__ == "GenerateRequest"]
    text = "<tool_call>\n" + '{"name": "f", "arguments": '
    assert [one.request_id for one in sent] == ["r"]
    assert list(sent[0].token_ids.ids) == [1, 2, *map(ord, text)]
    assert sent[0].WhichOneof("constraint") == "json_schema"


@pytest.mark.parametrize(
    ("ending", "closed"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False)]
)
async def test_reasoning_that_a_template_opens_is_closed(ending, closed):
    class Template(Script):
        def RenderChat(self, request, context):  # noqa: N802
            response = super().RenderChat(request, context)
            response.text += ending
            return response

    with scripted_server(Template()) as served:
        made = Upstream(Config(server=served.address), lambda error: None)
        await made.check_ready()
        job = read_a_chat(response_format={"type": "json_object"})
        async for _ in Run(made, made.client(None), job, "r").events():
            pass
        await made.close()
        (sent,) = (one for one in served.script.requests if type(one).__name__ == "GenerateRequest")
    closing = [ord(char) for char in "\n</think>\n\n"] if closed else []
    assert list(sent.token_ids.ids) == [1, 2, *closing]


async def test_a_run_that_ends_within_a_part(served, upstream):
    served.script.blocked = True
    run = Run(upstream, upstream.client(None), read_a_chat(**FORCED), "r")
    seen = []
    async for event in run.events():
        seen.append(event)
        if len(seen) == 2:
            run.end()
    assert len(seen) == 2
    assert await asyncio.to_thread(served.script.ended.wait, 30)


async def test_bad_parameters_of_a_tool_are_named():
    class Refuses(Script):
        def Generate(self, request, context):  # noqa: N802
            self.error = bad_field("json_schema", "is bad")
            yield from super().Generate(request, context)

    with scripted_server(Refuses()) as served:
        made = Upstream(Config(server=served.address), lambda error: None)
        await made.check_ready()
        run = Run(made, made.client(None), read_a_chat(**FORCED), "r")
        with pytest.raises(ApiError) as raised:
            await anext(run.events())
        assert raised.value.param == "tools.0.function.parameters"
        await made.close()
