from __future__ import annotations

import re

import pytest

from scheduler_service.chat_template import ChatTemplate, TypedText, control_pattern
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


def test_a_broken_template_stops_the_start():
    with pytest.raises(ModelFilesError, match="does not compile"):
        ChatTemplate("{% for %}", {})


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
