from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_files import write_byte_level, write_json

from scheduler_service.chat_output import (
    END_CALL,
    OutputFormat,
    OutputPiece,
    ToolCallPiece,
    find_format,
)
from scheduler_service.generate_call import Tool
from scheduler_service.tokenizer import Tokenizer

JSON = OutputFormat("qwen3", has_reasoning=True)
XML = OutputFormat("qwen3_xml", has_reasoning=True)
FORMATS = pytest.mark.parametrize("output_format", [JSON, XML])
SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "count": {"type": "integer"},
        "odd": {"type": 5, "anyOf": {"a": 1}},
    },
}
TOOLS = (Tool("run", None, json.dumps(SCHEMA)), Tool("bare"))
# Pieces of which answers, whole and broken, are made.
PARTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n", " ", "a", "<", "</tool"),
    *('{"name": "f", "arguments": {"a": "\\"}<", "b": [1, {}]}}', '{"arguments": {}, "name": "g"}'),
    *(
        '{"name": "f", "arguments": {"a"',
        '"',
        "\\",
        "{",
        "}",
        "]",
        ",",
        ":",
        '"name"',
        '"arguments"',
    ),
    *(
        "<function=run>",
        "<parameter=code>",
        "</parameter>",
        "</function>",
        "<parameter=count>",
        "7",
    ),
)
ANSWERS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=14).map("".join)


def read(output_format, *texts, opens=False):
    """The joined pieces: text, reasoning, calls as (name, arguments)."""
    parser = output_format.parser(opens, TOOLS)
    whole = OutputPiece()
    for text in texts:
        whole += parser.push(text)
    whole += parser.finish()
    return whole.text, whole.reasoning, calls_of(whole.tool_calls)


def calls_of(pieces):
    calls = []
    for piece in pieces:
        if piece.index == len(calls):
            assert piece.id == f"call_{piece.index}"
            assert piece.name
            calls.append([piece.name, ""])
        else:
            assert piece.index == len(calls) - 1
            assert (piece.id, piece.name) == ("", "")
        calls[-1][1] += piece.arguments_json
    return [tuple(call) for call in calls]


def json_call(text):
    return f"<tool_call>\n{text}\n</tool_call>"


def xml_call(name, *arguments):
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


F = '{"name": "f", "arguments": {"a": 1}}'


@FORMATS
@pytest.mark.parametrize(
    ("answer", "opens", "want"),
    [
        ("Hi.", False, ("Hi.", "")),
        ("\n a \n", False, ("\n a \n", "")),
        ("<think>\nwhy\n\nso\n</think>\n\nHi.\n", False, ("Hi.\n", "why\n\nso")),
        (" \n<think>\nwhy</think>Hi", False, ("Hi", "why")),
        ("<think>\n\n</think>\n\nHi", False, ("Hi", "")),
        ("why\n</think>\n\nHi", True, ("Hi", "why")),
        ("\nwhy\n</thin", True, ("", "why\n</thin")),
        ("why <tool_call>", True, ("", "why <tool_call>")),
        ("a <think>b</think>", False, ("a <think>b</think>", "")),
        ("<thin", False, ("<thin", "")),
        ("</think>", False, ("</think>", "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning(output_format, answer, opens, want):
    assert read(output_format, answer, opens=opens) == (*want, [])


def test_without_reasoning_in_the_template_think_is_text():
    plain = OutputFormat("qwen3", has_reasoning=False)
    assert read(plain, "<think>a</think>") == ("<think>a</think>", "", [])


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        (json_call(F), ("", [("f", '{"a": 1}')])),
        ("Look:\n" + json_call(F) + "\n" + json_call(F), ("Look:", [("f", '{"a": 1}')] * 2)),
        (json_call(F) + "\n\nDone.", ("Done.", [("f", '{"a": 1}')])),
        # The order of the keys, and keys of other makers.
        (json_call('{"arguments":{"b":[]},"id":"x","name":"g"}'), ("", [("g", '{"b":[]}')])),
        (json_call('{"n": -1.5e3, "x": [true, {}], "name": "g"}'), ("", [("g", "{}")])),
        # What looks like an end inside a string.
        (
            json_call('{"name": "f", "arguments": {"a": "\\"}</tool_call>\\\\", "b": "{"}}'),
            ("", [("f", '{"a": "\\"}</tool_call>\\\\", "b": "{"}')]),
        ),
        (json_call('{"name": "\\u00e9", "arguments": {}}'), ("", [("\u00e9", "{}")])),
        # A stop string, or the length, took the end mark.
        ("<tool_call>" + F, ("", [("f", '{"a": 1}')])),
        ("<tool_call>\n" + F + "\n", ("", [("f", '{"a": 1}')])),
    ],
)
def test_calls_in_json(answer, want):
    text, _, calls = read(JSON, answer)
    assert (text, calls) == want


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "nothing",
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "a\nb", "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f" "arguments": {}}',
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"arguments": {"a": 1}}',
        '{"arguments": {"a": 1}, "arguments": {}, "name": "f"}',
        '{"x": <, "name": "f", "arguments": {}}',
    ],
)
def test_what_is_no_call_is_text_to_the_byte(text):
    answer = "a\n" + json_call(text) + "\nb"
    assert read(JSON, answer) == (answer, "", [])


@pytest.mark.parametrize(
    ("answer", "text", "arguments"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": "b', "", '{"a": "b'),
        ('<tool_call>{"name": "f", "arguments": {"a": [1}} x', "}} x", '{"a": [1'),
        ('<tool_call>{"name": "f", "arguments": {"a": "b\\', "\\", '{"a": "b'),
        ('<tool_call>{"name": "f", "arguments": {} oops', " oops", "{}"),
        ('<tool_call>{"name": "f", "arguments": {}, "name"', ', "name"', "{}"),
        ("<tool_call>" + F + " x</tool_call>", " x</tool_call>", '{"a": 1}'),
        ("<tool_call>" + F + "\n</tool_", "\n</tool_", '{"a": 1}'),
    ],
)
def test_of_a_call_that_breaks_off_what_was_given_stays(answer, text, arguments):
    got_text, _, calls = read(JSON, answer)
    assert (got_text, calls[0][1]) == (text, arguments)


def test_a_call_that_begins_anew_is_found():
    answer = "<tool_call>\n" + json_call(F)
    assert read(JSON, answer) == ("<tool_call>\n", "", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ((), {}),
        ((("code", "print(1)\n\n<b>"), ("count", "7")), {"code": "print(1)\n\n<b>", "count": 7}),
        # By the schema a string, whatever it looks like.
        ((("code", "7"), ("maybe", '{"a": 1}')), {"code": "7", "maybe": '{"a": 1}'}),
        (
            (("either", "7"), ("odd", "8"), ("more", " [1, null] ")),
            {"either": 7, "odd": 8, "more": [1, None]},
        ),
        (
            (("count", "seven"), ("more", "NaN"), ("x", "")),
            {"count": "seven", "more": "NaN", "x": ""},
        ),
        ((("code", 'a "b" \\ \u00e9'),), {"code": 'a "b" \\ \u00e9'}),
    ],
)
def test_calls_in_xml(arguments, want):
    text, _, calls = read(XML, "Look:\n" + xml_call("run", *arguments) + "\nDone.")
    assert text == "Look:Done."
    ((name, written),) = calls
    assert name == "run"
    assert json.loads(written) == want


def test_numbers_are_passed_on_as_they_are_written():
    digits = "1" * 5000
    _, _, calls = read(XML, xml_call("bare", ("a", digits), ("b", "1.50")))
    assert calls == [("bare", '{"a": ' + digits + ', "b": 1.50}')]


def test_a_value_nested_without_end_is_a_string():
    _, _, calls = read(XML, xml_call("unknown", ("a", "[" * 100_000)))
    assert json.loads(calls[0][1]) == {"a": "[" * 100_000}


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        (json_call(F), (json_call(F), [])),
        ("<tool_call>\n<function=>\n</function>", ("<tool_call>\n<function=>\n</function>", [])),
        ("<tool_call><function=f><parameter=a>1", ("<tool_call><function=f><parameter=a>1", [])),
        (
            "<tool_call><function=f><parameter=a>1</parameter>\n<parameter=b>2",
            ("\n<parameter=b>2", [("f", '{"a": 1')]),
        ),
    ],
)
def test_broken_calls_in_xml(answer, want):
    text, _, calls = read(XML, answer)
    assert (text, calls) == want


def test_arguments_come_as_they_are_written():
    parser = JSON.parser(False)
    assert parser.push('<tool_call>\n{"name": "f", "argu').tool_calls == ()
    assert parser.push('ments": {"a').tool_calls == (
        ToolCallPiece(0, "call_0", "f", ""),
        ToolCallPiece(0, arguments_json='{"a'),
    )
    assert parser.push('": "b').tool_calls == (ToolCallPiece(0, arguments_json='": "b'),)
    assert parser.push('"}').tool_calls == (ToolCallPiece(0, arguments_json='"}'),)
    assert parser.push("}\n</tool_call>") == OutputPiece()


@FORMATS
def test_text_is_freed_as_soon_as_it_cannot_be_markup(output_format):
    parser = output_format.parser(False)
    given = [parser.push(text).text for text in ("Hi", " <", "b", "\n", "c", "<tool_call", "!")]
    assert given == ["Hi", " ", "<b", "", "\nc", "", "<tool_call!"]
    parser = output_format.parser(True)
    given = [parser.push(text).reasoning for text in ("\n", "Hm", "\n", "</thi", "s", "</think>")]
    assert given == ["", "Hm", "", "", "\n</this", ""]


@FORMATS
@given(ANSWERS, st.lists(st.integers(0, 200)), st.booleans())
@example('<tool_call>{"name": "f", "arguments": {"a": 1 <', [46], False)
@example("<tool_call>" + F + "\n</tool_call>", [], False)
@example(xml_call("run", ("code", "a\n</para"), ("count", "7")), [], False)
def test_the_cut_of_the_text_changes_nothing(output_format, answer, cuts, opens):
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    parts = [answer[a:b] for a, b in itertools.pairwise(places)]
    want = read(output_format, answer, opens=opens)
    assert read(output_format, *parts, opens=opens) == want
    assert read(output_format, *answer, opens=opens) == want


@FORMATS
@given(ANSWERS | st.text())
def test_without_markup_the_text_is_unchanged(output_format, answer):
    if "<tool_call>" not in answer and not answer.lstrip().startswith("<think>"):
        assert read(output_format, answer) == (answer, "", [])


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.dictionaries(st.text(), st.recursive(st.integers() | st.text() | st.none(), st.lists)),
)
def test_any_call_as_json_comes_back(name, arguments):
    answer = json_call(json.dumps({"name": name, "arguments": arguments}))
    text, _, calls = read(JSON, answer)
    assert text == ""
    assert [(n, json.loads(a)) for n, a in calls] == [(name, arguments)]


@given(st.text().filter(lambda text: "</parameter>" not in text))
def test_any_string_as_xml_comes_back(value):
    _, _, calls = read(XML, xml_call("run", ("code", value)))
    assert [(n, json.loads(a)) for n, a in calls] == [("run", {"code": value})]


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ('<tool_call>\n{"name": "x", "arguments": {}} <think></think>', JSON),
        ('<tool_call>\n{"name": "x", "arguments": {}}', OutputFormat("qwen3", False)),
        ("<tool_call>\n<function=a>\n<parameter=b> arguments </think>", XML),
        ("<think></think>", None),
        ("[TOOL_CALLS] arguments", None),
        ("", None),
    ],
)
def test_the_format_is_found_in_the_template(tmp_path, source, want):
    assert find_format(source, Tokenizer(write_byte_level(tmp_path))) == want


def test_no_format_when_its_markup_is_left_out_of_the_text(tmp_path):
    path = write_byte_level(tmp_path)
    values = json.loads(path.read_text())
    for token in values["added_tokens"]:
        token["special"] = token["special"] or token["content"] == "</think>"
    write_json(path, values)
    assert find_format(f"<tool_call> arguments {END_CALL}", Tokenizer(path)) is None
