"""Answers with calls, in parts, against a server that is a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slotwise_client import (
    Accepted,
    Chat,
    Delta,
    Finished,
    FinishReason,
    PromptLogprobs,
    Timings,
    Tool,
    Usage,
)
from slotwise_gateway.tool_turn import CALL, ToolPlan, ToolTurn

SCHEMA = {"type": "object"}
F, G = Tool("f", "d", SCHEMA), Tool('g"', None, None)
PROMPT = Chat(())
IDS = [1, 2, 3]
HEAD_F = '{"name": "f", "arguments": '
HEAD_G = '{"name": "g\\"", "arguments": '


@dataclass
class Part:
    """What the server answers to a part, a token for each text."""

    texts: Sequence[str]
    reason: FinishReason = FinishReason.STOP
    stop: str | int | None = None
    prompt_logprobs: bool = False


@dataclass
class Script:
    """Plays parts in turn; keeps what was asked."""

    parts: list[Part]
    asked: list[tuple[Any, dict, int | None]] = field(default_factory=list)

    async def part(self, prompt, options, tool):
        self.asked.append((prompt, dict(options), tool))
        number = len(self.asked)
        part = self.parts[number - 1]
        prompt_tokens = 3 if isinstance(prompt, Chat) else len(prompt)
        yield Accepted(f"r-{number}", prompt_tokens, 1, 0)
        if part.prompt_logprobs:
            yield PromptLogprobs("r", 1, ())
        for index, text in enumerate(part.texts):
            yield Delta("r", 0, index, (100 * number + index,), text)
        usage = Usage(prompt_tokens, len(part.texts), number)
        timings = Timings(0, 0, 0, 0)
        yield Finished("r", 0, part.reason, part.stop, usage, timings)

    async def token_ids(self, text: str) -> list[int]:
        return [ord(char) for char in text]


def written(*texts: str) -> list[int]:
    return [ord(char) for text in texts for char in text]


def plan(*tools: Tool, forced: bool = True, single: bool = True) -> ToolPlan:
    return ToolPlan(tuple(enumerate(tools)), is_forced=forced, is_single=single)


async def run(a_plan: ToolPlan, script: Script, **options) -> list[Any]:
    turn = ToolTurn(a_plan, options, script)
    events = [event async for event in turn.events(PROMPT, IDS)]
    assert isinstance(events[0], Accepted)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, (Accepted, Finished)) for event in events) == 2
    deltas = [event for event in events if isinstance(event, Delta)]
    begins = [delta.first_token_index for delta in deltas]
    ends = [delta.first_token_index + len(delta.token_ids) for delta in deltas]
    assert begins == [0, *ends[:-1]], "a gap or an overlap"
    return events


def told(events: list[Any]) -> tuple[str, list[tuple[int, str, str]]]:
    """The text, and of each call index, name and arguments."""
    text, names, arguments = "", {}, {}
    for event in events:
        if isinstance(event, Delta):
            text += event.text
            for part in event.tool_calls:
                assert bool(part.name) == bool(part.id)
                names.setdefault(part.index, part.name)
                arguments[part.index] = arguments.get(part.index, "") + part.arguments_json
    return text, [(index, names[index], arguments[index]) for index in names]


async def test_a_named_function():
    script = Script([Part(["{", "}"])])
    events = await run(plan(F), script, max_new_tokens=9, temperature=0.5, stop=["}"], n=1)
    assert told(events) == ("", [(0, "f", "{}")])
    prompt, options, tool = script.asked[0]
    assert prompt == [*IDS, *written(f"{CALL}\n{HEAD_F}")][: len(prompt)]
    assert options == {"max_new_tokens": 9, "temperature": 0.5, "n": 1, "json_schema": SCHEMA}
    assert tool == 0
    assert events[-1].usage == Usage(len(prompt), 2, 1)


async def test_one_of_several_functions():
    script = Script([Part(['{"na', HEAD_G[4:]]), Part(["{}"])])
    events = await run(plan(F, G), script, max_new_tokens=9, logprobs=0, prompt_logprobs=1)
    assert told(events) == ("", [(0, 'g"', "{}")])
    (first, of_choice, _), (second, of_arguments, tool) = script.asked
    assert of_choice["choice"] == [HEAD_F, HEAD_G]
    assert first[: len(IDS) + 12] == [*IDS, *written(f"{CALL}\n")]
    # What was chosen is read on as the tokens that it was written in.
    assert second == [*IDS, *written(f"{CALL}\n"), 100, 101, 200][: len(second)]
    assert of_arguments["json_schema"] == SCHEMA
    assert (of_arguments["max_new_tokens"], of_choice["prompt_logprobs"]) == (7, 1)
    assert "prompt_logprobs" not in of_arguments
    assert tool == 1
    assert events[-1].usage.completion_tokens == 3


async def test_text_and_a_call():
    script = Script([Part(["so: ", CALL], stop=CALL), Part(["{}"])])
    a_plan = plan(F, forced=False)
    events = await run(a_plan, script, stop=["END"], ignore_eos=True, min_new_tokens=1)
    # The script does not hold the stop string back, as a server does.
    assert told(events) == (f"so: {CALL}", [(0, "f", "{}")])
    (first, of_text, _), (second, of_call, _) = script.asked
    assert first is PROMPT
    assert of_text == {
        "stop": ["END", CALL],
        "ignore_eos": True,
        "min_new_tokens": 1,
        "parse_output": True,
    }
    # The model has opened the call.
    assert second[:5] == [*IDS, 100, 101]
    assert second[5 : 5 + len(HEAD_F) + 1] == written(f"\n{HEAD_F}")
    assert of_call == {"json_schema": SCHEMA}
    assert events[-1].usage == Usage(3, 3, 1)


async def test_calls_until_the_model_ends():
    script = Script(
        [
            Part([CALL], stop=CALL),
            Part(["{}"]),
            Part(["\n", "\n x", CALL], stop=CALL),
            Part(["[]"]),
            Part(["."], stop=2),
        ]
    )
    a_plan = plan(F, forced=False, single=False)
    events = await run(a_plan, script, min_new_tokens=1)
    text, calls = told(events)
    assert calls == [(0, "f", "{}"), (1, "f", "[]")]
    assert text.replace(CALL, "") == " x."
    between = script.asked[2]
    assert between[0][-len("}\n</tool_call>") - 1 :][1:] != []
    assert written("}\n</tool_call>") == between[0][-14:]
    assert between[1] == {"stop": [CALL]}
    assert events[-1].matched_stop == 2
    assert events[-1].usage.completion_tokens == 1 + 1 + 3 + 1 + 1


async def test_the_first_call_ends_the_answer_where_one_is_wanted():
    script = Script([Part([CALL], stop=CALL), Part(["{}"])])
    events = await run(plan(F, forced=False, single=True), script)
    assert told(events)[1] == [(0, "f", "{}")]
    assert len(script.asked) == 2


async def test_text_alone():
    script = Script([Part(["hello"], stop="END", prompt_logprobs=True)])
    events = await run(plan(F, forced=False), script, stop=["END"])
    assert told(events) == ("hello", [])
    assert isinstance(events[1], PromptLogprobs)
    assert events[-1].matched_stop == "END"


async def test_the_limit_within_a_text():
    script = Script([Part(["a", "b"], FinishReason.LENGTH)])
    events = await run(plan(F, forced=False), script, max_new_tokens=2)
    assert events[-1].finish_reason is FinishReason.LENGTH


async def test_the_limit_where_a_call_begins():
    script = Script([Part(["a", CALL], stop=CALL)])
    events = await run(plan(F, forced=False), script, max_new_tokens=2)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert told(events)[1] == []
    assert len(script.asked) == 1


async def test_the_limit_within_a_name():
    script = Script([Part(['{"name'], FinishReason.LENGTH)])
    events = await run(plan(F, G), script, max_new_tokens=1)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert told(events) == ("", [])


async def test_the_limit_within_the_arguments():
    script = Script([Part([CALL], stop=CALL), Part(["{"], FinishReason.LENGTH), Part(["never"])])
    events = await run(plan(F, forced=False, single=False), script, max_new_tokens=2)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert told(events)[1] == [(0, "f", "{")]
    assert len(script.asked) == 2


async def test_a_call_that_is_cancelled():
    script = Script([Part(["{"], FinishReason.CANCELLED)])
    assert (await run(plan(F), script))[-1].finish_reason is FinishReason.CANCELLED


async def test_a_tool_without_parameters_takes_any_object():
    script = Script([Part(["{}"])])
    await run(plan(G), script)
    assert script.asked[0][1]["json_schema"] == {"type": "object"}
    assert json.loads(HEAD_G + "{}}")["name"] == 'g"'
