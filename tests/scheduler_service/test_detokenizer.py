from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import byte_level, sentencepiece
from tokenizers import Tokenizer, decoders

from scheduler_service.detokenizer import Detokenizer, TokenBytes, decode
from scheduler_service.json_file import ModelFilesError

BYTE_LEVEL = byte_level()
SENTENCEPIECE = Tokenizer.from_str(json.dumps(sentencepiece()))
CONTROLS = frozenset({0, 1, 2})
LEVEL_BYTES = TokenBytes({"type": "ByteLevel"}, BYTE_LEVEL.id_to_token, CONTROLS)
PIECE_BYTES = TokenBytes(sentencepiece()["decoder"], SENTENCEPIECE.id_to_token, CONTROLS)

# A family, a rare character and a flag, as in the report.
B01_TEXT = "\U0001f469\u200d\U0001f467 \u9ea4 \U0001f1e9\U0001f1ea"
TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab 你龤🇩🇪👩\u200d é\n"))
)


def stream(tokens: TokenBytes, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokens)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize(
    ("tokenizer", "tokens"), [(BYTE_LEVEL, LEVEL_BYTES), (SENTENCEPIECE, PIECE_BYTES)]
)
def test_split_characters_arrive_whole(tokenizer, tokens):
    """B01."""
    ids = tokenizer.encode(B01_TEXT, add_special_tokens=False).ids
    halves = [i for i in ids if "\ufffd" in tokenizer.decode([i])]
    assert len(halves) > 3, "the characters must be split over tokens"
    parts = stream(tokens, ids)
    assert not [part for part in parts if "\ufffd" in part]
    assert "".join(parts) == B01_TEXT
    assert parts[-1] == ""


@settings(max_examples=200)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_any_ids_join_to_the_library_decoding(ids):
    want = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert "".join(stream(LEVEL_BYTES, ids)) == want
    assert decode(LEVEL_BYTES, ids) == want


@settings(max_examples=300)
@given(
    st.sampled_from([(LEVEL_BYTES, 512), (PIECE_BYTES, 300)]),
    st.data(),
    st.booleans(),
)
def test_any_ids_join_to_the_decoding_of_all(kind, data, keep_control):
    """Spaces, halves of characters and control tokens; a text that reads all bytes at once agrees.

    Never more than half a character is held, so that a token is constant work.
    """
    tokens, num_ids = kind
    ids = data.draw(st.lists(st.integers(0, num_ids - 1), max_size=40))
    detokenizer = Detokenizer(tokens, keep_control=keep_control)
    parts = []
    for token_id in ids:
        parts.append(detokenizer.push(token_id))
        held, _ = detokenizer._utf8.getstate()
        assert len(held) <= 3
    parts.append(detokenizer.finish())
    whole = b"".join(tokens.get(token_id, keep_control) for token_id in ids)
    want = whole.decode("utf-8", "replace")
    if tokens.strip_count and want.startswith(tokens.strip_char):
        want = want[1:]
    assert "".join(parts) == want == decode(tokens, ids, keep_control=keep_control)


@settings(max_examples=200)
@given(TEXTS)
def test_any_text_comes_back_from_byte_level(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert decode(LEVEL_BYTES, ids, keep_control=True) == text


@settings(max_examples=200)
@given(TEXTS)
def test_any_text_comes_back_from_sentencepiece(text):
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    assert "".join(stream(PIECE_BYTES, ids)) == SENTENCEPIECE.decode(ids)


@settings(max_examples=200)
@given(st.lists(st.integers(0x80, 0xFF), min_size=4, max_size=4))
def test_bytes_are_held_while_they_may_complete_and_no_longer(data):
    """Of any four bytes that are no start of a text, something is out before the fifth."""
    ids = SENTENCEPIECE.token_to_id("<0x00>")
    parts = stream(PIECE_BYTES, [ids + byte for byte in data])
    assert "".join(parts[:4])


def test_half_a_character_at_the_end_is_told_once():
    first_byte = SENTENCEPIECE.token_to_id("<0xE4>")
    assert stream(PIECE_BYTES, [first_byte, first_byte + 1]) == ["", "\ufffd", "\ufffd"]


def test_control_tokens_are_left_out_unless_asked_for():
    ids = [1, *BYTE_LEVEL.encode("hi").ids, 2]
    assert decode(LEVEL_BYTES, ids) == "hi"
    assert decode(LEVEL_BYTES, ids, keep_control=True) == "<|im_start|>hi<|im_end|>"
    detokenizer = Detokenizer(LEVEL_BYTES)
    assert (detokenizer.push(2), detokenizer.push_kept(2)) == ("", "<|im_end|>")


def test_the_first_space_stays_when_the_text_goes_on():
    ids = SENTENCEPIECE.encode("word", add_special_tokens=False).ids
    assert decode(PIECE_BYTES, ids) == "word"
    going_on = Detokenizer(PIECE_BYTES, at_text_start=False)
    assert "".join(map(going_on.push, ids)) == " word"


def test_only_the_first_space_is_taken_off():
    ids = SENTENCEPIECE.encode("  a  b", add_special_tokens=False).ids
    assert decode(PIECE_BYTES, ids) == "  a  b"


def test_an_id_without_a_token_has_no_text():
    assert decode(LEVEL_BYTES, [511, 9999]) == ""


def test_metaspace_decoders_are_understood():
    decoder = json.loads(decoders.Metaspace().__getstate__())
    tokens = TokenBytes(decoder, {5: "\u2581hi", 6: "\u2581you"}.get, frozenset())
    assert decode(tokens, [5, 6]) == "hi you"


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##"}])
def test_unknown_decoders_are_refused(decoder):
    with pytest.raises(ModelFilesError, match="decoder"):
        TokenBytes(decoder, {}.get, frozenset())
