from __future__ import annotations

from clients.openai_gateway.test_chat_answer import delta, finished

from slotwise_client import FinishReason, ToolCallDelta
from slotwise_gateway.call_text import CallTexts

FIRST = ToolCallDelta(0, "call_0", 'f"', '{"a"')
MORE = ToolCallDelta(0, "", "", ": 1}")
SECOND = ToolCallDelta(1, "call_1", "g", "{}")
F = '<tool_call>\n{"name": "f\\"", "arguments": {"a": 1}'
G = '<tool_call>\n{"name": "g", "arguments": {}'
END = "}\n</tool_call>"


def told(*events):
    texts = CallTexts()
    made = [one for event in events for one in texts.of(event)]
    assert not any(getattr(one, "tool_calls", ()) for one in made)
    return made


def text(*events):
    return "".join(getattr(one, "text", "") for one in told(*events))


def test_what_has_no_call_stays_as_it_is():
    events = [delta("a"), delta("", reasoning_text="r"), finished()]
    assert told(*events) == events


def test_a_call_is_text():
    calls = [delta("so ", tool_calls=(FIRST,)), delta(tool_calls=(MORE,))]
    assert text(*calls, finished()) == f"so {F}{END}"
    assert text(*calls, delta(" then"), finished()) == f"so {F}{END}\n then"
    assert text(*calls, finished(FinishReason.LENGTH)) == f"so {F}"


def test_several_calls():
    one = delta(tool_calls=(FIRST, MORE, SECOND))
    assert text(one, finished()) == f"{F}{END}\n{G}{END}"
    assert text(one, delta(tool_calls=(FIRST, MORE)), finished()) == f"{F}{END}\n{G}{END}\n{F}{END}"


def test_choices_do_not_mix():
    one = delta(tool_calls=(SECOND,), index=1)
    assert [each.text for each in told(one, delta("a"), finished())[:-1]] == [G, "a"]
    assert text(one, finished(index=1)) == G + END
