from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_service.config import (
    Access,
    Config,
    ConfigError,
    Keeping,
    TlsFiles,
    join_address,
    parse_arguments,
)
from scheduler_service.engine_types import EngineConfig, Geometry, WorkersTls
from scheduler_service.prefix_index import PrefixReuse

ENGINE = EngineConfig(model_dir="m")
CONFIG = Config(model_dir=Path("m"), engine=ENGINE)


def test_the_command_line_without_flags_gives_the_defaults():
    assert parse_arguments(["--model", "m"]) == CONFIG


def test_flags_arrive():
    flags = "--model m --host :: --port 0 --tp 2 --num-slots 4 --max-seq-len 64 --dtype bfloat16"
    flags += " --max-running 3"
    flags += " --kv-dtype float16 --max-queue-len 3 --max-step-tokens 9 --grace 1.5 --events"
    flags += " --device cpu --max-mixed-step-tokens 5"
    flags += " --served-name n --threads 2 --run-ahead-window-ms 2.5 --worker-timeout 7"
    flags += " --fair-share --max-waiting-per-client 11 --tokens t --insecure-tokens"
    flags += " --recovery-timeout 8 --log-format json --log-level debug"
    config = parse_arguments(flags.split())
    assert (config.address, config.served_name, config.grace_s) == ("[::]:0", "n", 1.5)
    assert config.events
    assert (config.log_format, config.log_level) == ("json", "debug")
    engine = config.engine
    assert (engine.world_size, engine.num_slots, engine.max_seq_len) == (2, 4, 64)
    assert (engine.max_running, engine.running_bound) == (3, 3)
    assert (engine.weight_dtype, engine.kv_dtype) == ("bfloat16", "float16")
    assert (engine.max_step_tokens, engine.max_mixed_step_tokens) == (9, 5)
    assert (engine.max_queue_len, engine.num_threads, engine.device) == (3, 2, "cpu")
    assert (engine.fair_share, engine.max_waiting_per_client) == (True, 11)
    assert engine.run_ahead_window_ns == 2_500_000
    assert (engine.worker_timeout_s, engine.recovery_timeout_s) == (7, 8)


@pytest.mark.parametrize("flags", [["--fair-share"], ["--max-waiting-per-client", "2"]])
def test_clients_that_are_not_told_apart_have_no_shares(flags):
    with pytest.raises(ConfigError, match=r"(True|2) and no tokens are wanted"):
        parse_arguments(["--model", "m", *flags])
    config = parse_arguments(["--model", "m", "--tokens", "t", *flags])
    assert config.engine.fair_share or config.engine.max_waiting_per_client == 2


def test_given_workers_are_not_spawned():
    config = parse_arguments(["--model", "m", "--workers", "a:1,unix:/b"])
    assert config.engine.worker_addresses == ("a:1", "unix:/b")
    assert (config.engine.world_size, config.engine.model_dir) == (2, "")


def test_workers_may_be_told_of_later():
    config = parse_arguments(["--model", "m", "--workers", "-", "--tp", "3"])
    engine = config.engine
    assert (engine.workers_are_told, engine.spawns, engine.worker_addresses) == (True, False, ())
    assert (engine.world_size, engine.model_dir) == (3, "")
    with pytest.raises(ConfigError, match="running workers have chosen theirs"):
        parse_arguments(["--model", "m", "--workers", "-", "--device", "cpu"])
    tls = parse_arguments(["--model", "m", "--workers", "-", "--workers-tls-ca", "ca.pem"])
    assert tls.engine.workers_tls is not None


def test_all_slots_run_where_nothing_else_is_asked_for():
    config = parse_arguments(["--model", "m", "--num-slots", "300"])
    assert (config.engine.max_running, config.engine.running_bound) == (0, 300)


def test_a_step_that_is_given_holds_all_slots():
    assert parse_arguments(["--model", "m", "--num-slots", "300"]).engine.max_step_tokens == 0
    with pytest.raises(ConfigError, match=r"max_step_tokens is 256, below num_slots 300"):
        parse_arguments(["--model", "m", "--num-slots", "300", "--max-step-tokens", "256"])


def test_the_advice_of_the_workers_holds_where_nothing_is_asked_for():
    geometry = Geometry(
        num_slots=8,
        max_seq_len=64,
        num_layers=2,
        vocab_size=100,
        fingerprint="f",
        weight_dtype="float32",
        kv_dtype="float32",
        max_step_tokens=2048,
        max_mixed_step_tokens=512,
        run_ahead_window_ns=10_000_000,
        max_running=5,
        max_logprobs_steps=9,
        prefix_reuse=PrefixReuse.PREFILL,
        device_name="x86_64 avx2",
        build="b",
    )
    limits = ENGINE.limits(geometry)
    assert (limits.max_step_tokens, limits.max_mixed_step_tokens) == (2048, 512)
    assert limits.run_ahead_window_ns == 10_000_000
    assert (limits.max_running, limits.max_logprobs_steps) == (5, 9)
    assert limits.prefix_reuse is PrefixReuse.PREFILL
    asked = replace(ENGINE, max_mixed_step_tokens=100, run_ahead_window_ns=5).limits(geometry)
    assert (asked.max_mixed_step_tokens, asked.run_ahead_window_ns) == (100, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 0}, "tp is 0"),
        ({"worker_addresses": ("a:1",), "world_size": 2}, "1 addresses, and tp is 2"),
        ({"model_dir": ""}, "neither"),
        ({"num_slots": 0}, "num_slots is 0; 1 to"),
        ({"max_running": 9}, "max_running is 9; 0 to 8"),
        ({"max_running": -1}, "max_running is -1"),
        ({"max_running": 4, "max_step_tokens": 3}, "below max_running 4"),
        ({"max_seq_len": -1}, "max_seq_len is -1"),
        ({"max_seq_len": 1}, "max_seq_len is 1"),
        ({"max_queue_len": 0}, "max_queue_len is 0"),
        ({"max_step_tokens": -1}, "max_step_tokens is -1"),
        ({"max_mixed_step_tokens": -1}, "max_mixed_step_tokens is -1"),
        ({"run_ahead_window_ns": -1}, "run_ahead_window_ns is -1"),
        ({"device": "cuda:1"}, "device is 'cuda:1'; one of auto, cpu, cuda"),
        ({"device": "cpu", "worker_addresses": ("a:1",)}, "running workers have chosen"),
        ({"device": "cuda", "num_threads": 2}, "threads is 2 and device is 'cuda'"),
        ({"max_outstanding": 0}, "max_outstanding is 0"),
        ({"weight_dtype": "int4"}, "dtype is 'int4'; one of auto, float32, bfloat16, float16"),
        ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8'"),
        ({"worker_timeout_s": 0.0}, "worker_timeout is 0"),
        ({"recovery_timeout_s": float("nan")}, "recovery_timeout is nan"),
    ],
)
def test_engine_settings_that_cannot_be(changes, words):
    with pytest.raises(ConfigError) as caught:
        Config(model_dir=Path("m"), engine=replace(ENGINE, **changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": ""}, "host is empty"),
        ({"port": 65536}, "port is 65536; 0 to 65535"),
        ({"grace_s": -1.0}, "grace is -1"),
        ({"grace_s": 1e10}, "grace is 10000000000.0; 0 to 1000000000 seconds"),
        ({"keeping": Keeping(retention_s=1e17)}, "retention is 1e+17"),
        ({"keeping": Keeping(max_window_s=1e12)}, "max_attach_window is 1000000000000.0"),
        ({"keeping": Keeping(journal_max_bytes=1 << 20)}, "journal_max_mb is 1; 8 to"),
        ({"keeping": Keeping(slow_reader_s=0.0)}, "slow_reader_timeout is 0"),
        ({"access": Access(insecure_tokens=True)}, "insecure_tokens is given and tokens is not"),
        ({"log_level": "loud"}, "log_level is 'loud'"),
        ({"log_format": "xml"}, "log_format is 'xml'"),
    ],
)
def test_process_settings_that_cannot_be(changes, words):
    with pytest.raises(ConfigError) as caught:
        replace(CONFIG, **changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [["--dtype", "int8"], ["--slots", "3"], ["--port", "x"], ["--journal", ""], ["--tokens", ""]],
)
def test_words_that_are_not_understood(words):
    with pytest.raises(ConfigError, match=words[0]):
        parse_arguments(["--model", "m", *words])


def test_addresses():
    assert join_address("127.0.0.1", 5) == "127.0.0.1:5"
    assert join_address("::1", 5) == "[::1]:5"


def test_who_may_call_is_told_by_flags():
    flags = "--model m --host 0.0.0.0 --tls-cert c --tls-key k --tls-client-ca a --tokens t"
    flags += " --no-reflection --no-operator-calls --workers w:1"
    flags += " --workers-tls-ca wa --workers-tls-cert wc --workers-tls-key wk"
    config = parse_arguments(flags.split())
    tls = TlsFiles(Path("c"), Path("k"), Path("a"))
    assert config.access == Access(tls, Path("t"), reflection=False, operator_calls=False)
    assert config.access.has_client_ca
    assert config.engine.workers_tls == WorkersTls("wa", "wc", "wk")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tls-cert c", "--tls-cert is c, --tls-key is not given and --tls-client-ca is not"),
        ("--tls-key k", "--tls-cert is not given, --tls-key is k"),
        ("--tls-client-ca a", "TLS needs --tls-cert and --tls-key"),
        ("--workers w:1 --workers-tls-cert c --workers-tls-key k", "workers-tls-ca is not given"),
        ("--workers w:1 --workers-tls-ca a --workers-tls-cert c", "the other two together"),
        ("--workers w:1 --workers-tls-ca a --workers-tls-key k", "the other two together"),
        ("--workers unix:/w --workers-tls-ca a", "Unix sockets and spawned workers need none"),
        ("--workers-tls-ca a", "Unix sockets and spawned workers need none"),
    ],
)
def test_half_of_tls_is_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        parse_arguments(["--model", "m", *flags.split()])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "server.example"])
def test_tokens_cross_no_network_in_the_clear(host):
    flags = ["--model", "m", "--host", host, "--tokens", "t"]
    with pytest.raises(ConfigError, match=f"host is '{host}' and tokens are wanted.*tls-cert"):
        parse_arguments(flags)
    assert parse_arguments([*flags, "--insecure-tokens"]).access.insecure_tokens
    assert parse_arguments([*flags, "--tls-cert", "c", "--tls-key", "k"]).access.tls


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_tokens_on_this_machine_need_no_tls(host):
    config = parse_arguments(["--model", "m", "--host", host, "--tokens", "t"])
    assert config.access.tokens == Path("t")
