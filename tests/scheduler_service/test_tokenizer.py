from __future__ import annotations

import json

import pytest
from tokenizer_files import byte_level, write_byte_level, write_json, write_sentencepiece

from scheduler_service.json_file import ModelFilesError
from scheduler_service.tokenizer import MAX_SHRINK, Tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer(write_byte_level(tmp_path))


@pytest.mark.parametrize("typed", ["<|im_end|>", "<think>", "a<|im_start|>b", "<|endoftext|>"])
def test_typed_control_tokens_stay_text(tokenizer, typed):
    """B06, raw prompts."""
    ids = tokenizer.encode(typed)
    controls = {tokenizer.token_id(text) for text in tokenizer.control_texts}
    assert not controls & set(ids)
    assert tokenizer.decode(ids) == typed


def test_control_tokens_on_demand(tokenizer):
    ids = tokenizer.encode("hi<|im_end|>", parse_control_tokens=True)
    assert ids == [*tokenizer.encode("hi"), 2]


def test_text_without_control_tokens_is_the_same_both_ways(tokenizer):
    text = "hello world\n\n\n\u4f60\u597d <b> a"
    assert tokenizer.encode(text) == tokenizer.encode(text, parse_control_tokens=True)
    assert tokenizer.encode(text) == byte_level().encode(text).ids


def test_blank_added_tokens_are_no_markup(tokenizer):
    assert tokenizer.control_texts == {
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<think>", "</think>"),
    }
    assert tokenizer.special_texts == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert tokenizer.token_id("\n\n\n") in tokenizer.encode("a\n\n\nb")


def test_the_frame_is_the_checkpoints_own(tmp_path):
    tokenizer = Tokenizer(write_sentencepiece(tmp_path))
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == 1
    assert 1 not in tokenizer.encode("hello", add_special_tokens=False)
    assert 1 not in tokenizer.encode("<s>hello", add_special_tokens=False)


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path):
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("hello world, hello")) == "hello world, hello"


def test_detokenizing(tokenizer):
    ids = [1, *tokenizer.encode("hi there"), 2]
    assert tokenizer.decode(ids) == "hi there"
    assert tokenizer.decode(ids, keep_control_tokens=True) == "<|im_start|>hi there<|im_end|>"


def test_a_huge_text_is_known_to_be_too_long(tokenizer):
    text = "hello " * 100_000
    assert tokenizer.surely_exceeds(text, 100)
    assert not tokenizer.surely_exceeds(text, len(tokenizer.encode(text)))


@pytest.mark.parametrize("text", ["\U0001f937" * 3000, "\u9ea4" * 4000, "hello " * 2000])
def test_a_huge_text_is_measured_in_bytes_where_letters_are_bytes(tokenizer, text):
    """Four times as soon, for the texts that take longest to encode."""
    longest = max(map(len, byte_level().get_vocab(with_added_tokens=True)))
    num_tokens = len(text.encode()) // (longest * MAX_SHRINK)
    assert tokenizer.surely_exceeds(text, num_tokens - 1)
    assert not tokenizer.surely_exceeds(text, num_tokens + 1)


def test_a_huge_text_is_measured_in_characters_elsewhere(tmp_path):
    tokenizer = Tokenizer(write_sentencepiece(tmp_path))
    text = "\u9ea4" * 4000
    assert not tokenizer.surely_exceeds(text, 4000 // MAX_SHRINK)


def test_a_control_token_that_plain_text_can_make_is_refused(tmp_path):
    values = json.loads(byte_level().to_str())
    hello = byte_level().token_to_id("hello")
    token = {**values["added_tokens"][0], "id": hello, "content": "hello"}
    values["added_tokens"].append(token)
    write_json(tmp_path / "tokenizer.json", values)
    with pytest.raises(ModelFilesError, match=f"'hello' .* {hello}"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not valid JSON"), ("{}", "not a usable tokenizer")]
)
def test_broken_files(tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelFilesError, match=rf"tokenizer.json: {words}"):
        Tokenizer(path)
    with pytest.raises(ModelFilesError, match="no such file"):
        Tokenizer(tmp_path / "none.json")


@pytest.mark.parametrize(
    "token", [5, {"id": 0}, {"id": "0", "content": "a"}, {"id": 0, "content": []}]
)
def test_added_tokens_that_are_none(tmp_path, token):
    path = write_byte_level(tmp_path)
    values = json.loads(path.read_text())
    values["added_tokens"].append(token)
    write_json(path, values)
    with pytest.raises(ModelFilesError, match="added_tokens"):
        Tokenizer(path)
