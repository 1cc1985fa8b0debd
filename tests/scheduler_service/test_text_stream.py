from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.detokenizer import Detokenizer, TokenBytes
from scheduler_service.text_stream import StopMatch, StopMatcher, TextOptions, TextStream

# Ids are characters, so that every border is a token border; 0 is a control token.
CHARS = TokenBytes({"type": "Fuse"}, lambda i: "<end>" if i == 0 else chr(i), frozenset({0}))


def text_stream(**options) -> TextStream:
    return TextStream(Detokenizer(CHARS), TextOptions(**options))


def run(stream: TextStream, text: str, at_once: int = 1) -> str:
    ids = [ord(char) for char in text]
    parts = [stream.push(ids[i : i + at_once]).text for i in range(0, len(ids), at_once)]
    return "".join(parts) + stream.finish()


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
def test_a_stop_string_never_leaks(at_once):
    """B03, first run."""
    stream = text_stream(stop=("DEFGHIJ",))
    assert run(stream, "ABC DEFGHIJ KLM", at_once) == "ABC "
    assert stream.matched_stop == "DEFGHIJ"
    assert stream.num_tokens == len("ABC DEFGHIJ")


def test_held_text_comes_out_at_the_end():
    """B03, second run."""
    stream = text_stream(stop=("DEFGHIJ",))
    parts = [stream.push([ord(char)]).text for char in "ABC DEF"]
    assert "".join(parts) == "ABC "
    assert stream.finish() == "DEF"
    assert stream.matched_stop is None


def test_text_is_held_no_longer_than_it_may_match():
    stream = text_stream(stop=("aab",))
    assert [stream.push([ord(c)]).text for c in "aaaxab"] == ["", "", "a", "aax", "", "ab"]


def test_stop_strings_work_without_text():
    """B04."""
    stream = text_stream(stop=("\n",), omit_text=True)
    delta = stream.push([ord(c) for c in "ab\ncd"])
    assert (delta.token_ids, delta.text) == (tuple(map(ord, "ab\n")), "")
    assert stream.matched_stop == "\n"
    assert stream.push([ord("e")]).token_ids == ()
    assert stream.finish() == ""


def test_the_stop_string_can_be_kept():
    stream = text_stream(stop=("bc",), include_stop_in_output=True)
    assert run(stream, "abcd") == "abc"


def test_earliest_start_wins_then_the_longest():
    matcher = StopMatcher(["cd", "bcd", "abcd", "bcde"])
    assert matcher.push("xxabcdef") == StopMatch("abcd", "xx")
    assert StopMatcher(["bc", "bcd"]).push("abcde") == StopMatch("bcd", "a")


def test_an_end_id_has_no_text_unless_asked_for():
    end = frozenset({ord("!")})
    assert run(text_stream(end_token_ids=end), "ab!") == "ab"
    assert run(text_stream(end_token_ids=end, include_stop_in_output=True), "ab!") == "ab!"


def test_a_control_end_id_appears_only_when_asked_for():
    kept = text_stream(end_token_ids=frozenset({0}), include_stop_in_output=True)
    assert kept.push([ord("a"), 0]).text == "a<end>"
    assert text_stream(end_token_ids=frozenset({0})).push([ord("a"), 0]).text == "a"


def test_an_end_id_completes_no_stop_string():
    stream = text_stream(stop=("b!",), end_token_ids=frozenset({ord("!")}))
    assert run(stream, "ab!") == "ab"
    assert stream.matched_stop is None


def test_all_ids_are_passed_on():
    stream = text_stream()
    assert stream.push([1, 2, 3]).token_ids == (1, 2, 3)
    assert stream.push([4]).token_ids == (4,)
    assert stream.num_tokens == 4


@settings(max_examples=200)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_matches_are_those_of_a_plain_search(text, stops, at_once, num_first):
    """In what comes behind the first min_new_tokens tokens."""
    stream = text_stream(stop=tuple(stops), min_new_tokens=num_first)
    shown = run(stream, text, at_once)
    want, matched, used = text, None, len(text)
    for end in range(num_first, len(text) + 1):
        places = [(text.find(s, num_first, end), -len(s), s) for s in stops]
        found = [place for place in places if place[0] >= 0]
        if found:
            start, _, matched = min(found)
            want, used = text[:start], end
            break
    assert (shown, stream.matched_stop, stream.num_tokens) == (want, matched, used)
