from __future__ import annotations

import json
import shutil
from collections import namedtuple
from math import prod

import pytest
import torch
from safetensors.torch import load_file

from scheduler_service.tokenizer import Tokenizer
from slotwise_cli import make_checkpoint as module
from slotwise_cli.geometry import MODELS, model_config, parameter_shapes, step_bytes
from slotwise_cli.random_checkpoint import write_checkpoint
from slotwise_cli.server_process import running_server
from slotwise_client import Client
from worker import checkpoint as worker_checkpoint
from worker.checkpoint import open_checkpoint
from worker.model_config import parse_model_config

# Numbers of parameters as the model cards say them, in units of the last digit given there.
CARDS = {
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen2.5-0.5b": 0.49,
    "llama-3.2-1b": 1.23,
    "smollm2-135m": 0.135,
}
QUIET = (lambda *_: None,)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One layer of the smallest shape, in three files."""
    folder = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    config = model_config("smollm2-135m", layers=1)
    write_checkpoint(folder, config, "bfloat16", 0, *QUIET, shard_bytes=58 << 20)
    return folder


def weights(folder) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_the_worker_wants(name):
    config = model_config(name)
    wanted = worker_checkpoint.parameter_shapes(parse_model_config(config))
    assert parameter_shapes(config) == wanted
    billions = sum(map(prod, wanted.values())) / 1e9
    assert billions == pytest.approx(CARDS[name], rel=0.02)


def test_a_step_reads_the_weights_it_multiplies_and_the_cache():
    tied, untied = model_config("qwen3-0.6b"), model_config("qwen3-8b")
    whole = {
        n: 2 * sum(map(prod, parameter_shapes(c).values())) for n, c in ((0, tied), (8, untied))
    }
    assert step_bytes(tied, 2, 2, 0) == whole[0]
    assert step_bytes(untied, 2, 2, 0) == whole[8] - 2 * 151936 * 4096
    # 2 (K and V) x 36 layers x 8 heads x 128 x 2 bytes
    assert step_bytes(untied, 2, 2, 10) - step_bytes(untied, 2, 2, 0) == 10 * 147456


def test_the_worker_opens_it(small):
    opened = open_checkpoint(small)
    assert opened.weight_dtype == "bfloat16"
    assert len({located.path for located in opened.tensors.values()}) == 2
    index = json.loads((small / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights(small).values())


def test_weights_are_normal_and_rows_differ(small):
    for name, weight in weights(small).items():
        value = weight.float()
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name
            continue
        assert value.std().item() == pytest.approx(0.02, rel=0.01), name
        assert abs(value.mean().item()) < 2e-4, name
        # A share of normal numbers is beyond two deviations.
        assert (value.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, rel=0.08), name
        assert len(weight.view(torch.int16).unique(dim=0)) == len(weight), name


def test_no_stretch_of_a_weight_comes_twice(small):
    embedding = weights(small)["model.embed_tokens.weight"].view(torch.int16).flatten()
    starts = torch.arange(0, len(embedding) - 16, 1 << 16)
    stretches = torch.stack([embedding[start : start + 16] for start in starts.tolist()])
    assert len(stretches.unique(dim=0)) == len(stretches)


def test_weights_follow_from_seed_and_name(small, tmp_path):
    config = model_config("smollm2-135m", layers=2)
    made = {}
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_checkpoint(folder, config, "bfloat16", seed, *QUIET)
        made[seed] = weights(folder)
    for name, weight in weights(small).items():
        assert weight.equal(made[0][name]), "files and layers must not matter"
        assert name.endswith("norm.weight") or not weight.equal(made[1][name])
    first, second = (made[0][f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    assert not first.equal(second)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_precisions_hold_the_same_numbers(small, tmp_path, dtype):
    config = model_config("smollm2-135m", layers=1, dtype=dtype)
    write_checkpoint(tmp_path, config, dtype, 0, *QUIET)
    other = weights(tmp_path)
    for name, weight in weights(small).items():
        assert other[name].dtype is getattr(torch, dtype)
        torch.testing.assert_close(other[name].float(), weight.float(), rtol=2**-8, atol=1e-7)


def test_every_id_has_a_text(small):
    tokenizer = Tokenizer(small / "tokenizer.json")
    text = "Naïve café, 龤 \n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_id("<|endoftext|>") == 1
    assert tokenizer.token_id("<|im_end|>") == 2
    ordinary = [i for i in range(260, 49152) if tokenizer.decode([i]).strip()]
    assert len(ordinary) == 49152 - 260
    assert len({tokenizer.decode([i]) for i in ordinary}) == len(ordinary)


@pytest.mark.slow
def test_it_is_served(small, slotwise):
    with running_server(small, ["--max-seq-len", "128"], *QUIET) as address:
        with Client(address) as client:
            assert client.model_info().end_token_ids == (2,)
        words = ["generate", "--chat", "hello", "--max-new-tokens", "6", "--ignore-eos"]
        done = slotwise(*words, "--temperature", "0", "--json", "--server", address)
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert len(answer["token_ids"]) == 6
    assert answer["text"].strip()


def test_the_command_makes_a_folder(slotwise, tmp_path):
    out = tmp_path / "new" / "model"
    words = ["make-checkpoint", "--like", "smollm2-135m", "--layers", "1", "--max-positions", "99"]
    done = slotwise(*words, str(out), "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert answer["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    opened = open_checkpoint(out)
    assert (opened.config.num_layers, opened.config.max_position_embeddings) == (1, 99)
    assert [path.name for path in out.parent.iterdir()] == ["model"], "scratch must be gone"


def test_an_empty_folder_is_taken_and_another_refused(slotwise, tmp_path, monkeypatch):
    written = []

    def write(folder, *arguments):
        written.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "write_checkpoint", write)
    words = ["make-checkpoint", "--like", "qwen3-32b"]
    monkeypatch.setattr(module, "_check_room", lambda *_: None)
    assert slotwise(*words, str(tmp_path)).code == 0
    done = slotwise(*words, str(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert "is not empty" in done.err
    done = slotwise(*words, str(tmp_path / "config.json"))
    assert done.code == 2
    assert "is not a folder" in done.err
    assert len(written) == 1
    assert (tmp_path / "config.json").read_text() == "{}"


def test_too_little_room_is_told_before_writing(slotwise, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 0, 16_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    done = slotwise("make-checkpoint", "--like", "qwen3-8b", str(tmp_path / "new" / "model"))
    assert done.code == 1
    # 8.19 numbers of 2 bytes.
    assert "16,398,247,936 bytes" in done.err
    assert "16,000,000,000 free" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--like", "qwen3-8"], "did you mean qwen3-8b"),
        (["--like", "gpt"], "llama-3.2-1b"),
        (["--like", "qwen3-8b", "--dtype", "int8"], "bfloat16, float16, float32"),
        (["--like", "qwen3-8b", "--layers", "0"], ""),
    ],
)
def test_wrong_usage(slotwise, tmp_path, words, named):
    done = slotwise("make-checkpoint", *words, str(tmp_path / "model"))
    assert done.code == 2
    assert named in done.err
    assert not list(tmp_path.iterdir())
