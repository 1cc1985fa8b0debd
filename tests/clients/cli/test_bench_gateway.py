"""`bench gateway` on a small server."""

import json

import pytest
from typer.testing import CliRunner

from checkpoints import make_checkpoint
from slotwise_cli.__main__ import build_app
from slotwise_cli.bench_gateway import _num_tokens

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":7}}\n\n'


def test_both_ways_are_measured(tmp_path):
    folder = tmp_path / "tiny"
    make_checkpoint(folder, "qwen3", tokenizer=True)
    command = ["bench", "gateway", "--model", str(folder), "--concurrency", "3", "--repeats", "2"]
    command += ["--output-tokens", "8", "--json-file", str(tmp_path / "result.json"), "--json"]
    done = CliRunner().invoke(build_app(), command)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert (result["model"], result["concurrency"], result["repeats"]) == ("tiny", 3, 2)
    for name in ("grpc", "gateway"):
        speed = result[name]["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert 0 < result[name]["ttft_ms_p50"] <= result[name]["ttft_ms_p90"]
        assert result[name]["client_cpu_us_per_token"]["median"] > 0
    for name in ("ratio", "gateway_cpu_us_per_token"):
        assert 0 <= result[name]["min"] <= result[name]["median"] <= result[name]["max"]
    assert result["ratio"]["min"] > 0


def test_the_table_tells_the_ratio(tmp_path):
    folder = tmp_path / "tiny"
    make_checkpoint(folder, "qwen3", tokenizer=True)
    command = ["bench", "gateway", "--model", str(folder), "--concurrency", "1", "--repeats", "1"]
    done = CliRunner().invoke(build_app(), [*command, "--output-tokens", "4"])
    assert done.exit_code == 0, done.output
    assert "of the tokens/s of gRPC" in done.output


@pytest.mark.parametrize(
    ("chunks", "count"),
    [
        ([b"data: {}\n\n", USAGE + b"data: [DONE]\n\n"], 7),
        ([USAGE, b"data: [DONE]\n\n"], 7),
        ([USAGE], 0),
        ([b"data: {}\n\n", b"data: [DONE]\n\n"], 0),
        ([b'data: {"error": {}}\n\n'], 0),
        ([], 0),
    ],
)
def test_how_many_tokens_a_stream_had(chunks, count):
    """An answer that ended badly counts as none."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
    assert _num_tokens(body) == count
