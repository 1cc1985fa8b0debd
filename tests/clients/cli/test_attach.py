"""`slotwise attach` and `slotwise replay` with a real server behind them."""

from __future__ import annotations

import pytest

from checkpoints import make_checkpoint
from integration.servers import running_server


@pytest.fixture
def tiny_model(tmp_path):
    make_checkpoint(tmp_path / "tiny", "qwen3", tokenizer=True)
    return tmp_path / "tiny"


def test_what_was_generated_is_read_again_and_computed_again(tiny_model, slotwise):
    with running_server(tiny_model, "--num-slots", "4") as server:
        words = ["--server", server.address]
        asked = ["--request-id", "mine", "--temperature", "1", "--ignore-eos", "-n", "2"]
        done = slotwise("generate", "a b c", *asked, "--max-new-tokens", "9", *words)
        assert done.code == 0
        again = slotwise("attach", "mine", *words)
        assert (again.code, again.out) == (0, done.out)
        replayed = slotwise("replay", "mine", *words)
        assert (replayed.code, replayed.err) == (0, "")
        assert replayed.out.splitlines()[-1] == "equal: 18 tokens"
        refused = slotwise("attach", "mine", "--from", "99", *words)
        assert (refused.code, "beyond" in refused.err) == (4, True)
        assert slotwise("replay", "nobody", *words).code == 4
