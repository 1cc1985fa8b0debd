"""`bench traces` on a small server."""

import json

from typer.testing import CliRunner

from checkpoints import make_checkpoint
from slotwise_cli.__main__ import build_app


def test_rounds_with_traces_and_without(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    make_checkpoint(folder, "qwen3", tokenizer=True)
    command = ["bench", "traces", "--model", str(folder), "--concurrency", "2", "--repeats", "2"]
    done = CliRunner().invoke(build_app(), [*command, "--output-tokens", "8", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    for name in ("sampled", "not sampled"):
        speed = result[name]["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    # Two requests a round, three rounds with the first; none of those that are not sampled.
    num_spans = result["num_spans"]
    assert {num_spans[name] for name in ("slotwise.generate", "queue", "prefill", "decode")} == {6}
    # One of the prompt, and one of the tokens at least.
    assert num_spans["step"] >= 12
