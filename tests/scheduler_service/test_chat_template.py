from __future__ import annotations

import re

import pytest

from scheduler_service.chat_template import (
    ChatTemplate,
    TemplateTimeError,
    TypedText,
    control_pattern,
)
from scheduler_service.errors import InvalidArgumentError
from scheduler_service.json_file import ModelFilesError

HI = [{"role": "user", "content": "hi"}]
STRICT = (
    "{% for m in messages %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


def render(source, messages=HI, add_generation_prompt=True, **variables):
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(
        messages, add_generation_prompt=add_generation_prompt, variables=variables
    )


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (
            "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}",
            "<s>user:hi",
        ),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'a': '<&é'} | tojson(indent=1) }}", '{\n "a": "<&é"\n}'),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ add_generation_prompt }}", "True"),
    ],
)
def test_what_templates_use(source, want):
    assert render(source) == want


def test_variables_of_the_caller_win_over_special_tokens():
    assert render("{{ enable_thinking }}{{ bos_token }}", enable_thinking=False) == "False<s>"
    assert render("{{ bos_token }}", bos_token="x") == "x"


def test_the_words_of_the_template_reach_the_caller():
    """B08: its refusal is the caller's error."""
    with pytest.raises(InvalidArgumentError, match="roles must alternate") as caught:
        render(STRICT, HI + HI)
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ raise_exception('x' * 100000) }}",
    ],
)
def test_any_failure_is_the_callers_and_short(source):
    with pytest.raises(InvalidArgumentError) as caught:
        render(source)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "source", ["{% for %}", "{% if x %}" * 3000, "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}"]
)
def test_a_broken_template_stops_the_start(source):
    with pytest.raises(ModelFilesError, match="does not compile"):
        ChatTemplate(source, {})


CONTROLS = control_pattern({"<a>", "<a>b", "[x]"})


def test_hidden_texts_come_back():
    typed = TypedText(["1<a>2<a>b3[x]"])
    hidden = typed.hide("1<a>2<a>b3[x]", CONTROLS)
    assert len(hidden) == 6
    assert not re.search(r"[<\[]", hidden)
    pieces = typed.pieces(f"<a>{hidden}[x]")
    assert pieces == [
        ("<a>1", False),
        ("<a>", True),
        ("2", False),
        ("<a>b", True),
        ("3", False),
        ("[x]", True),
        ("[x]", False),
    ]


def test_private_use_characters_of_the_user_are_not_taken_for_markers():
    text = "\U000f0000\U000f0001<a>\U000f0000"
    typed = TypedText([text])
    assert "".join(t for t, _ in typed.pieces(typed.hide(text, CONTROLS))) == text
    assert typed.pieces(text) == [(text, False)]


def test_when_every_private_use_character_is_taken():
    ranges = [(0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)]
    everything = "".join(chr(c) for first, last in ranges for c in range(first, last + 1))
    with pytest.raises(InvalidArgumentError, match="private-use"):
        TypedText([everything]).hide("<a>", CONTROLS)


def test_no_control_tokens_no_pattern():
    assert control_pattern(()) is None


@pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 10 }}", "{% for i in range(9) %}" * 9])
def test_a_template_that_works_without_end_is_the_callers_error(source):
    source += "{% endfor %}" * source.count("{% for")
    with pytest.raises(InvalidArgumentError, match="chat: the chat template works on it without"):
        render(source)


def test_a_rendering_that_took_too_long_says_so():
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}", {})
    with pytest.raises(TemplateTimeError, match="takes longer than"):
        template.render(HI, add_generation_prompt=True, variables={}, max_ns=-1)


def test_large_chats_have_room_for_the_copies_that_templates_make():
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '|' + m.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 8000
    assert len(render(source, messages)) == 8000 * 2007


def test_tojson_escapes_when_asked_to_but_not_the_markers_of_typed_text():
    text = 'a"\u00e9\U0001f600\U000f0000'
    got = render("{{ messages[0].content | tojson(ensure_ascii=true) }}", [{"content": text}])
    assert got == '"a\\"\\u00e9\\ud83d\\ude00\U000f0000"'


@pytest.mark.parametrize(
    "call", ["indent=10 ** 9", "indent='x' * 99", "separators=('x' * 99, ':')", "indent=17"]
)
def test_tojson_writes_no_wide_margins(call):
    with pytest.raises(InvalidArgumentError, match="at most 16"):
        render("{{ [[1]] | tojson(" + call + ") }}")


def test_tojson_of_deep_values_is_charged_for_its_margins():
    deep = [0] * 50_000
    for _ in range(90):
        deep = [deep]
    with pytest.raises(InvalidArgumentError, match="bytes of values"):
        render("{{ x | tojson(indent=16) }}", x=deep)
    assert len(render("{{ x | tojson }}", x=deep)) == 3 * 50_000 - 2 + 182


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{% if messages[0].content is none %}{% endif %}", True),
        ("{% if m['content'] is not none %}{% endif %}", True),
        ("{% if messages[0].tool_calls is none %}{% endif %}", False),
        ("{% if messages[0].content is defined %}{% endif %}", False),
    ],
)
def test_whether_a_template_knows_messages_without_content(source, want):
    assert ChatTemplate(source, {}).knows_no_content is want
