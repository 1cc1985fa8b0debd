from __future__ import annotations

import os

import pytest
from tokenizer_files import write_json, write_model

from scheduler_service.json_file import JsonFile, ModelFilesError
from scheduler_service.model_files import read_model_info
from scheduler_service.sampling import SamplingDefaults

IDS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def read(folder, name=""):
    return read_model_info(folder, name, IDS.get)


def test_a_plain_folder(tmp_path):
    info = read(write_model(tmp_path))
    assert info.name == tmp_path.name
    assert (info.model_type, info.architectures) == ("llama", ("LlamaForCausalLM",))
    assert info.vocab_size == 512
    assert (info.end_token_ids, info.bos_token_id) == ((2,), 1)
    assert info.default_sampling == SamplingDefaults(1.0, 1.0, 0, 0.0)
    assert info.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert "im_start" in info.chat_template
    assert info.unapplied == ()


def test_the_served_name_wins(tmp_path):
    assert read(write_model(tmp_path), "mine").name == "mine"


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (7, None, (2, 7)),
        ([7, 5], None, (2, 5, 7)),
        (7, 9, (2, 7, 9)),
        (7, [9, 0], (0, 2, 7, 9)),
        (None, [9], (2, 9)),
    ],
)
def test_end_ids_are_the_union_of_all_files(tmp_path, config, generation, ends):
    """B07."""
    write_model(tmp_path, eos_token_id=config)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": generation})
    assert read(tmp_path).end_token_ids == ends


def test_a_special_token_may_be_an_object(tmp_path):
    write_model(tmp_path, eos_token_id=None)
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": {"content": "<|endoftext|>"}})
    assert read(tmp_path).end_token_ids == (0,)


def test_begin_id_of_config_when_the_tokenizer_has_none(tmp_path):
    write_model(tmp_path, bos_token_id=4)
    write_json(tmp_path / "tokenizer_config.json", {})
    assert read(tmp_path).bos_token_id == 4


def test_sampling_defaults_come_from_generation_config(tmp_path):
    write_model(tmp_path)
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}
    write_json(tmp_path / "generation_config.json", values)
    assert read(tmp_path).default_sampling == SamplingDefaults(0.6, 0.95, 20, 0.0)


def test_what_is_not_applied_is_named(tmp_path):
    write_model(tmp_path)
    values = {"no_repeat_ngram_size": 3, "num_beams": 1, "typical_p": 1.0}
    write_json(tmp_path / "generation_config.json", values)
    assert read(tmp_path).unapplied == ("no_repeat_ngram_size 3",)


def test_a_repetition_penalty_is_a_default(tmp_path):
    write_model(tmp_path)
    write_json(tmp_path / "generation_config.json", {"repetition_penalty": 1.05})
    model = read(tmp_path)
    assert (model.default_sampling.repetition_penalty, model.unapplied) == (1.05, ())
    write_json(tmp_path / "generation_config.json", {"repetition_penalty": 0})
    with pytest.raises(ModelFilesError, match=r"repetition_penalty.*out of range"):
        read(tmp_path)


def test_the_template_file_wins(tmp_path):
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert read(tmp_path).chat_template == "from the file"


def test_named_templates(tmp_path):
    write_model(tmp_path)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert read(tmp_path).chat_template == "d"
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named[:1]})
    with pytest.raises(ModelFilesError, match=r"tokenizer_config.json: chat_template .*default"):
        read(tmp_path)


def test_without_a_template(tmp_path):
    assert read(write_model(tmp_path, template=None)).chat_template is None


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("config.json", {"vocab_size": 5}, "model_type is null"),
        ("config.json", {"model_type": "llama"}, "vocab_size is null"),
        ("config.json", {"model_type": "llama", "vocab_size": "5"}, 'vocab_size is "5"'),
        ("config.json", {"model_type": "llama", "vocab_size": 9, "eos_token_id": 9}, "below"),
        ("config.json", {"model_type": "llama", "vocab_size": 9, "eos_token_id": "x"}, '"x"'),
        ("config.json", ["not", "an", "object"], "list"),
        ("generation_config.json", {"eos_token_id": [512]}, "512"),
        ("generation_config.json", {"temperature": -1}, "-1"),
        ("generation_config.json", {"temperature": "hot"}, '"hot"'),
        ("generation_config.json", {"top_p": 1.5}, "1.5"),
        ("generation_config.json", {"top_k": -2}, "-2"),
        ("tokenizer_config.json", {"eos_token": "<nowhere>"}, "<nowhere>"),
        ("tokenizer_config.json", {"eos_token": 3}, "3"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is 3"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, file, values, words):
    write_model(tmp_path)
    write_json(tmp_path / file, values)
    with pytest.raises(ModelFilesError) as caught:
        read(tmp_path)
    assert file in str(caught.value)
    assert words in str(caught.value)


def test_missing_folder_and_files(tmp_path):
    with pytest.raises(ModelFilesError, match="no such model folder"):
        read(tmp_path / "nothing")
    with pytest.raises(ModelFilesError, match=r"config.json: no such file"):
        read(tmp_path)


def test_broken_json(tmp_path):
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(ModelFilesError, match=r"x.json: not valid JSON"):
        JsonFile.read(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "1" * 5000 + "}"])
def test_json_that_python_cannot_hold(tmp_path, name, text):
    (write_model(tmp_path) / name).write_text(text)
    with pytest.raises(ModelFilesError, match="not valid JSON"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("generation_config.json", {"temperature": 10**400}),
        ("generation_config.json", {"top_k": 1 << 31}),
        ("tokenizer_config.json", {"eos_token": "\ud800"}),
    ],
)
def test_values_that_the_api_cannot_carry(tmp_path, name, change):
    write_json(write_model(tmp_path) / name, change)
    with pytest.raises(ModelFilesError, match=next(iter(change))):
        read(tmp_path)


def test_a_pipe_in_place_of_config_json_is_not_waited_for(tmp_path):
    (write_model(tmp_path) / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelFilesError, match="not a file"):
        read(tmp_path)


@pytest.mark.parametrize("target", ["/dev/zero", "."])
def test_what_is_no_file_in_place_of_the_template_is_not_read(tmp_path, target):
    (write_model(tmp_path) / "chat_template.jinja").symlink_to(target)
    with pytest.raises(ModelFilesError, match=r"chat_template.jinja: not a file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "limit"), [("chat_template.jinja", "1,048,576"), ("config.json", "134,217,728")]
)
def test_files_without_end_are_not_read(tmp_path, name, limit):
    (write_model(tmp_path) / name).touch()
    os.truncate(tmp_path / name, 1 << 40)
    with pytest.raises(ModelFilesError, match=f"{name}: has more than {limit} bytes"):
        read(tmp_path)


def test_a_template_that_is_too_long(tmp_path):
    write_model(tmp_path, template="x" * (1 << 20) + "y")
    with pytest.raises(ModelFilesError, match="of at most 1,048,576 characters"):
        read(tmp_path)


def test_words_of_a_file_fit_an_error():
    words = str(ModelFilesError("x.json: " + "\ud800" * 10_000 + " at the end"))
    assert words.startswith("x.json")
    assert words.endswith("at the end")
    assert len(words.encode()) < 10_000
