"""Settings of the scheduler process: one frozen record, checked once, and its command line."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from .engine_types import EngineConfig, WorkersTls

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
# Of gRPC, both ways. Texts of many MB fit; without a limit one call could fill the memory.
MAX_MESSAGE_BYTES = 64 << 20
# In place of addresses: standard input tells of them.
_TOLD = "-"
# Thirty years.
MAX_SECONDS = 1e9
# What the API can tell of, in milliseconds of 32 bits.
MAX_WINDOW_S = 4_294_967.0


class ConfigError(Exception):
    """A setting cannot be; the message names it, its value and the limit."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Of a port that speaks TLS, in PEM. With `client_ca`, clients must bring a certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call the public port, and what is served there."""

    # None: plain TCP.
    tls: TlsFiles | None = None
    # File of bearer tokens; None: nobody is asked for one.
    tokens: Path | None = None
    # Tokens may cross networks in the clear.
    insecure_tokens: bool = False
    reflection: bool = True
    operator_calls: bool = True

    @property
    def has_client_ca(self) -> bool:
        return self.tls is not None and self.tls.client_ca is not None


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of calls, for how long."""

    # Folder of the journal; None: nothing outlives the process.
    journal: Path | None = None
    journal_max_bytes: int = 1 << 30
    # Of ended calls, in memory and in the journal.
    retention_s: float = 300.0
    # The most that a call may go on without a reader.
    max_window_s: float = 300.0
    # How long a client may read nothing of what is sent to it.
    slow_reader_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the process is told. ConfigError when a value makes no sense."""

    model_dir: Path
    # "": the folder's name.
    served_name: str = ""
    host: str = "127.0.0.1"
    # 0: any free port.
    port: int = 50051
    # For Prometheus, over plain HTTP; None: nothing listens there. 0: any free port.
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    # Of an OpenTelemetry collector, over gRPC; "": nothing is traced.
    otlp_endpoint: str = ""
    # Share of requests that are traced, of those whose callers do not decide it.
    trace_sample_ratio: float = 1.0
    # What the engine is told; its fields carry their own defaults.
    engine: EngineConfig = field(default_factory=EngineConfig)
    access: Access = Access()
    keeping: Keeping = Keeping()
    # How long running requests may go on after SIGTERM.
    grace_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    # Progress and readiness as JSON lines on standard output.
    events: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError(
                "host is empty; 127.0.0.1 is this machine only, 0.0.0.0 every network"
            )
        _check_range("port", self.port, 0, 65535)
        _check_range("metrics_port", self.metrics_port or 0, 0, 65535)
        if not self.metrics_host:
            raise ConfigError("metrics_host is empty; 127.0.0.1 is this machine only")
        _check_tracing(self.otlp_endpoint, self.trace_sample_ratio)
        _check_seconds("grace", self.grace_s, 0)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        _check_engine(self.engine)
        if self.access.insecure_tokens and not self.access.tokens:
            raise ConfigError("insecure_tokens is given and tokens is not; leave it out")
        _check_range("journal_max_mb", self.keeping.journal_max_bytes >> 20, 8, 1 << 20)
        _check_seconds("retention", self.keeping.retention_s, 0)
        _check_seconds("max_attach_window", self.keeping.max_window_s, 0, MAX_WINDOW_S)
        _check_seconds("slow_reader_timeout", self.keeping.slow_reader_s, 0.001)
        if self.access.tokens and not (self.access.tls or self.access.insecure_tokens):
            _check_loopback(self.host)
        if not self.access.tokens:
            _check_needs_no_clients(self.engine)

    @property
    def address(self) -> str:
        """host:port, with an IPv6 host in brackets."""
        return join_address(self.host, self.port)


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host never leaves the machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _check_loopback(host: str) -> None:
    if not is_loopback(host):
        raise ConfigError(
            f"host is {host!r} and tokens are wanted: without TLS they could be read on the way; "
            "give --tls-cert and --tls-key, or --insecure-tokens when something else encrypts"
        )


def _check_needs_no_clients(engine: EngineConfig) -> None:
    values = {
        "fair_share": engine.fair_share,
        "max_waiting_per_client": engine.max_waiting_per_client,
    }
    for name, value in values.items():
        if value:
            raise ConfigError(
                f"{name} is {value} and no tokens are wanted: clients are told apart by their "
                "tokens; give a file of them"
            )


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_engine(engine: EngineConfig) -> None:
    _check_range("tp", engine.world_size, 1, 64)
    if engine.worker_addresses and len(engine.worker_addresses) != engine.world_size:
        raise ConfigError(
            f"workers names {len(engine.worker_addresses)} addresses, and tp is "
            f"{engine.world_size}; one per rank is needed"
        )
    if engine.spawns and not engine.model_dir:
        raise ConfigError("neither worker addresses nor a model folder is given")
    is_local = all(address.startswith("unix:") for address in engine.worker_addresses)
    if engine.workers_tls and is_local and not engine.workers_are_told:
        raise ConfigError(
            "workers_tls is given and no worker is dialled over TCP; Unix sockets and spawned "
            "workers need none, leave it out"
        )
    _check_range("num_slots", engine.num_slots, 1, (1 << 32) - 1)
    _check_range("max_running", engine.max_running, 0, engine.num_slots)
    _check_range("max_seq_len", engine.max_seq_len, 0, 1 << 24)
    if engine.max_seq_len == 1:
        raise ConfigError("max_seq_len is 1; a prompt and a generated token need 2, 0 is automatic")
    _check_range("max_queue_len", engine.max_queue_len, 1, 1 << 20)
    _check_range("max_queued_tokens", engine.max_queued_tokens, 0, 1 << 40)
    _check_range("max_waiting_per_client", engine.max_waiting_per_client, 0, 1 << 20)
    _check_range("max_step_tokens", engine.max_step_tokens, 0, (1 << 32) - 1)
    if 0 < engine.max_step_tokens < engine.running_bound:
        name = "max_running" if engine.max_running else "num_slots"
        raise ConfigError(
            f"max_step_tokens is {engine.max_step_tokens}, below {name} {engine.running_bound}; "
            "a step must hold one token of each request that runs, 0 is automatic"
        )
    _check_range("max_mixed_step_tokens", engine.max_mixed_step_tokens, 0, (1 << 32) - 1)
    _check_range("max_outstanding", engine.max_outstanding, 1, 16)
    _check_range("max_steps_per_command", engine.max_steps_per_command, 1, 1024)
    _check_range("run_ahead_window_ns", engine.run_ahead_window_ns, 0, 10**10)
    _check_choice("device", engine.device, DEVICES)
    if not engine.spawns and engine.device != "auto":
        raise ConfigError(
            f"device is {engine.device!r} and workers are given; running workers have chosen theirs"
        )
    _check_range("threads", engine.num_threads, 0, 4096)
    if engine.num_threads and engine.device == "cuda":
        raise ConfigError(
            f"threads is {engine.num_threads} and device is 'cuda'; a GPU worker has no use for "
            "threads, leave it out"
        )
    _check_choice("dtype", engine.weight_dtype, DTYPES)
    _check_choice("kv_dtype", engine.kv_dtype, DTYPES)
    if engine.num_standby_workers is not None:
        _check_range("standby_workers", engine.num_standby_workers, 0, engine.world_size)
        if not engine.spawns and engine.num_standby_workers:
            raise ConfigError(
                "standby_workers is given and workers are; who starts the workers keeps standbys"
            )
    _check_seconds("worker_timeout", engine.worker_timeout_s, 0.001)
    _check_seconds("recovery_timeout", engine.recovery_timeout_s, 0)


def _check_tracing(endpoint: str, ratio: float) -> None:
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint is {endpoint!r}; http://host:port or https://host:port is accepted"
        )
    if not 0 <= ratio <= 1:
        raise ConfigError(f"--trace-sample-ratio is {ratio}; 0 to 1 is accepted")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; {low} to {high} is accepted")


def _check_seconds(name: str, value: float, low: float, high: float = MAX_SECONDS) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; {low:g} to {high:.0f} seconds are accepted")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; one of {', '.join(choices)} is accepted")


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """ConfigError on words that are not understood and on values that cannot be."""
    given = _parser().parse_args(arguments)
    are_told = given.workers == _TOLD
    workers = tuple(one for one in given.workers.split(",") if one and not are_told)
    engine = EngineConfig(
        world_size=given.tp if given.tp is not None else max(1, len(workers)),
        worker_addresses=workers,
        workers_are_told=are_told,
        model_dir="" if given.workers else str(given.model),
        device=given.device,
        num_threads=given.threads,
        rendezvous_address=given.rendezvous,
        workers_tls=_workers_tls(given),
        num_slots=given.num_slots,
        max_running=given.max_running,
        max_seq_len=given.max_seq_len,
        weight_dtype=given.dtype,
        kv_dtype=given.kv_dtype,
        max_queue_len=given.max_queue_len,
        max_queued_tokens=given.max_queued_tokens,
        fair_share=given.fair_share,
        max_waiting_per_client=given.max_waiting_per_client,
        max_step_tokens=given.max_step_tokens,
        max_mixed_step_tokens=given.max_mixed_step_tokens,
        max_outstanding=given.max_outstanding,
        max_steps_per_command=given.max_steps_per_command,
        run_ahead_window_ns=round(given.run_ahead_window_ms * 1e6),
        worker_timeout_s=given.worker_timeout,
        recovery_timeout_s=given.recovery_timeout,
        num_standby_workers=given.standby_workers,
    )
    return Config(
        model_dir=given.model,
        served_name=given.served_name,
        host=given.host,
        port=given.port,
        metrics_port=given.metrics_port,
        metrics_host=given.metrics_host,
        otlp_endpoint=given.otlp_endpoint,
        trace_sample_ratio=given.trace_sample_ratio,
        engine=engine,
        grace_s=given.grace,
        log_level=given.log_level,
        log_format=given.log_format,
        events=given.events,
        access=_access(given),
        keeping=Keeping(
            journal=given.journal,
            journal_max_bytes=given.journal_max_mb << 20,
            retention_s=given.retention,
            max_window_s=given.max_attach_window,
            slow_reader_s=given.slow_reader_timeout,
        ),
    )


def _access(given: argparse.Namespace) -> Access:
    return Access(
        tls=_tls_files(given),
        tokens=given.tokens,
        insecure_tokens=given.insecure_tokens,
        reflection=not given.no_reflection,
        operator_calls=not given.no_operator_calls,
    )


def _tls_files(given: argparse.Namespace) -> TlsFiles | None:
    cert, key, client_ca = given.tls_cert, given.tls_key, given.tls_client_ca
    if cert and key:
        return TlsFiles(cert, key, client_ca)
    if cert or key or client_ca:
        raise ConfigError(
            f"--tls-cert is {_shown(cert)}, --tls-key is {_shown(key)} and --tls-client-ca is "
            f"{_shown(client_ca)}; TLS needs --tls-cert and --tls-key"
        )
    return None


def _workers_tls(given: argparse.Namespace) -> WorkersTls | None:
    ca, cert, key = given.workers_tls_ca, given.workers_tls_cert, given.workers_tls_key
    if bool(cert) != bool(key) or (cert and not ca):
        raise ConfigError(
            f"--workers-tls-ca is {_shown(ca)}, --workers-tls-cert is {_shown(cert)} and "
            f"--workers-tls-key is {_shown(key)}; TLS needs the CA, and the other two together"
        )
    return WorkersTls(str(ca), str(cert or ""), str(key or "")) if ca else None


def _shown(path: Path | None) -> str:
    return "not given" if path is None else str(path)


def _path(text: str) -> Path:
    """An empty text would be the current folder: a variable that is not set, as a rule."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; leave the option out, or name one")
    return Path(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    own = Config(model_dir=Path(), engine=EngineConfig(model_dir="."))
    parser = _Parser(
        prog="python -m scheduler_service",
        description="Serves a checkpoint over gRPC (slotwise.v1.Inference).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=_path, required=True, help="checkpoint folder")
    add("--served-name", default=own.served_name, help="name shown to clients; empty: the folder's")
    add("--host", default=own.host, help="address to listen on")
    add("--port", type=int, default=own.port, help="0: any free port")
    metrics = (
        "port of /metrics for Prometheus, over plain HTTP and for whoever asks; 0: any free one"
    )
    add("--metrics-port", type=int, help=metrics)
    add("--metrics-host", default=own.metrics_host, help="address that it listens on")
    endpoint = "OpenTelemetry collector of traces, over gRPC: http://host:port; default: none"
    add("--otlp-endpoint", default=own.otlp_endpoint, help=endpoint)
    ratio = "share of requests that are traced, where the caller does not say"
    add("--trace-sample-ratio", type=float, default=own.trace_sample_ratio, help=ratio)
    add("--grace", type=float, default=own.grace_s, help="seconds to finish requests on SIGTERM")
    add("--log-level", choices=LOG_LEVELS, default=own.log_level, help="least level to log")
    add("--log-format", choices=LOG_FORMATS, default=own.log_format, help="form of log lines")
    add("--events", action="store_true", help="progress and readiness as JSON lines on stdout")
    _add_keeping(parser, own.keeping)
    _add_access(parser)
    _add_engine(parser, own.engine)
    return parser


def _add_keeping(parser: argparse.ArgumentParser, own: Keeping) -> None:
    add = parser.add_argument
    journal = "folder of the journal: requests go on after a restart; default: none"
    add("--journal", type=_path, help=journal)
    size = own.journal_max_bytes >> 20
    add("--journal-max-mb", type=int, default=size, help="size of the journal, in MiB")
    retention = "seconds for which an ended request can still be attached to"
    add("--retention", type=float, default=own.retention_s, help=retention)
    window = "the most seconds that a request may go on when its connection is lost"
    add("--max-attach-window", type=float, default=own.max_window_s, help=window)
    slow = "seconds after which a client that reads nothing is cut off"
    add("--slow-reader-timeout", type=float, default=own.slow_reader_s, help=slow)


def _add_access(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tls-cert", type=_path, help="certificate chain of the port, in PEM")
    add("--tls-key", type=_path, help="its key, in PEM")
    add("--tls-client-ca", type=_path, help="clients must bring a certificate that this CA signed")
    add("--tokens", type=_path, help="JSON or TOML file of bearer tokens; calls need one of them")
    plain = "tokens may cross networks without TLS: something else encrypts"
    add("--insecure-tokens", action="store_true", help=plain)
    add("--no-reflection", action="store_true", help="do not describe the services to callers")
    add("--no-operator-calls", action="store_true", help="do not serve ListSlots and FlushCache")


def _add_engine(parser: argparse.ArgumentParser, own: EngineConfig) -> None:
    add = parser.add_argument
    add("--tp", type=int, help="tensor-parallel ranks; default: one, or one per given worker")
    workers = "running workers in rank order: host:port,unix:/path,...; -: JSON lines on standard "
    add("--workers", default="", help=workers + "input tell of their addresses, and of changes")
    add("--workers-tls-ca", type=_path, help="CA of the workers' certificates, in PEM")
    add("--workers-tls-cert", type=_path, help="certificate that workers are shown, in PEM")
    add("--workers-tls-key", type=_path, help="its key, in PEM")
    add("--rendezvous", default=own.rendezvous_address, help="host:port where the ranks meet")
    add("--device", choices=DEVICES, default=own.device, help="of spawned workers")
    add(
        "--threads",
        type=int,
        default=own.num_threads,
        help="per worker on the CPU; 0: cores / ranks",
    )
    slots = "seats with a KV cache; more than run at once keep finished prompts warm"
    add("--num-slots", type=int, default=own.num_slots, help=slots)
    running = "requests that run at once; 0: num-slots"
    add("--max-running", type=int, default=own.max_running, help=running)
    add("--max-seq-len", type=int, default=own.max_seq_len, help="context of a slot; 0: automatic")
    add("--dtype", choices=DTYPES, default=own.weight_dtype, help="of the weights")
    add("--kv-dtype", choices=DTYPES, default=own.kv_dtype, help="of the KV cache")
    add("--max-queue-len", type=int, default=own.max_queue_len, help="requests that may wait")
    add("--max-queued-tokens", type=int, default=own.max_queued_tokens, help="0: no bound")
    fair = "the client with the fewest running requests is next; else first come, first served"
    add("--fair-share", action="store_true", help=fair)
    waiting = "requests of one client that may wait; 0: no bound of its own"
    add("--max-waiting-per-client", type=int, default=own.max_waiting_per_client, help=waiting)
    budget = "token budget of a step; 0: as suits the device"
    add("--max-step-tokens", type=int, default=own.max_step_tokens, help=budget)
    mixed = "prompt tokens of a step in which slots decode; 0: as suits the device"
    add("--max-mixed-step-tokens", type=int, default=own.max_mixed_step_tokens, help=mixed)
    add("--max-outstanding", type=int, default=own.max_outstanding, help="commands sent ahead")
    add("--max-steps-per-command", type=int, default=own.max_steps_per_command, help="decode steps")
    window = "length of a command; 0: as suits the device"
    add("--run-ahead-window-ms", type=float, default=own.run_ahead_window_ns / 1e6, help=window)
    add("--worker-timeout", type=float, default=own.worker_timeout_s, help="silence, in seconds")
    standby = "processes that wait to take a lost worker's place; default: 1 on GPUs, else 0"
    add("--standby-workers", type=int, help=standby)
    add("--recovery-timeout", type=float, default=own.recovery_timeout_s, help="in seconds")
