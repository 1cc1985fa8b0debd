"""What the engine is told, and what it tells: settings, states and views."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .limits import Counters, Limits
from .prefix_index import PrefixReuse


class EngineFailedError(Exception):
    """The engine cannot start: a fault that another try would not mend. The message says what."""


@dataclass(frozen=True, slots=True)
class WorkersTls:
    """Paths of PEM files for the connections to workers over TCP."""

    # What signed the workers' certificates.
    ca: str
    # Our own, for workers that ask for one; both or none ("").
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine. Either `worker_addresses` (running workers, in rank order),
    `workers_are_told` (the addresses come later, and change) or `model_dir` (the engine spawns the
    workers itself) is given."""

    world_size: int = 1
    # "unix:/path.sock" or "host:port", one per rank; empty: spawn the workers.
    worker_addresses: tuple[str, ...] = ()
    # Whoever starts the workers tells where they are, as in told_workers.py.
    workers_are_told: bool = False
    model_dir: str = ""
    # None: connections to workers over TCP are plain.
    workers_tls: WorkersTls | None = None
    # Where spawned workers run: "cpu", "cuda" (rank r on device r), "auto" (the worker's choice).
    device: str = "auto"
    # Threads of each spawned worker; 0: cores // world_size, at least 1.
    num_threads: int = 0
    # "host:port" for the ranks' rendezvous; empty: a free local port (all workers on this host).
    rendezvous_address: str = ""
    num_slots: int = 8
    # Requests that run at once; 0: as many as there are slots.
    max_running: int = 0
    # 0: the smaller of the model's limit and 4,096.
    max_seq_len: int = 0
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    max_queue_len: int = 256
    # Prompt tokens that may wait; 0: no bound but max_queue_len.
    max_queued_tokens: int = 0
    # Slots are shared evenly among clients that wait; else first come, first served.
    fair_share: bool = False
    # Requests of one client that may wait; 0: no bound of its own.
    max_waiting_per_client: int = 0
    # Token budget of a step, and of prompts while slots decode; 0: what suits the device.
    max_step_tokens: int = 0
    max_mixed_step_tokens: int = 0
    max_outstanding: int = 2
    # Bounds what a wrong estimate of a step's time can do; else the window decides.
    max_steps_per_command: int = 32
    # 0: what suits the device.
    run_ahead_window_ns: int = 0
    # Time for a worker to listen, the import of its libraries included.
    connect_timeout_s: float = 60.0
    # Silence of a worker, while a message of it is due, after which the group is restarted.
    worker_timeout_s: float = 30.0
    # Processes that wait to take a lost rank's place; None: one where ranks run on GPUs.
    num_standby_workers: int | None = None
    # Time a recovery may take before running requests end UNAVAILABLE.
    recovery_timeout_s: float = 60.0

    @property
    def spawns(self) -> bool:
        """Whether the workers are processes of the engine's own."""
        return not self.worker_addresses and not self.workers_are_told

    @property
    def running_bound(self) -> int:
        """max_running, with 0 made good."""
        return self.max_running or self.num_slots

    def limits(self, geometry: Geometry) -> Limits:
        """The scheduler's limits for the slots that the workers have; their advice where nothing
        else was asked for."""
        return Limits(
            num_slots=geometry.num_slots,
            max_running=geometry.max_running,
            max_seq_len=geometry.max_seq_len,
            max_step_tokens=geometry.max_step_tokens,
            max_mixed_step_tokens=self.max_mixed_step_tokens or geometry.max_mixed_step_tokens,
            max_queue_len=self.max_queue_len,
            max_queued_tokens=self.max_queued_tokens,
            fair_share=self.fair_share,
            max_waiting_per_client=self.max_waiting_per_client,
            max_outstanding=self.max_outstanding,
            max_steps_per_command=self.max_steps_per_command,
            run_ahead_window_ns=self.run_ahead_window_ns or geometry.run_ahead_window_ns,
            max_logprobs_steps=geometry.max_logprobs_steps,
            prefix_reuse=geometry.prefix_reuse,
        )


class EngineState(enum.Enum):
    """SERVING on the readiness name means READY and nothing else."""

    # Loading and warm-up; requests are refused.
    STARTING = "starting"
    READY = "ready"
    # The workers are lost and being restarted; requests queue, running ones wait.
    RECOVERING = "recovering"
    # The recovery took too long: all requests have ended; requests are refused; attempts go on.
    DOWN = "down"
    # Running requests finish, new ones are refused.
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of one rank's start. total_bytes 0: not known."""

    rank: int
    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """One claim of the promise, as a worker checked it at start."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one rank reported when it was configured."""

    rank: int
    address: str
    device: str
    num_threads: int
    predicted_memory_bytes: int
    measured_memory_bytes: int
    # 0: not known.
    device_memory_bytes: int
    self_tests: tuple[SelfTestReport, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all ranks must report alike."""

    num_slots: int
    max_seq_len: int
    num_layers: int
    vocab_size: int
    fingerprint: str
    weight_dtype: str
    kv_dtype: str
    max_step_tokens: int
    # Advice; see Configured in worker.proto.
    max_mixed_step_tokens: int
    run_ahead_window_ns: int
    max_running: int
    # Decode steps with logprobs that may be outstanding.
    max_logprobs_steps: int
    prefix_reuse: PrefixReuse
    # What computes, and the native library: what bits depend on besides the weights.
    device_name: str
    build: str


@dataclass(frozen=True, slots=True)
class WorkerConfigured:
    """One rank's answer to being configured."""

    epoch: int
    geometry: Geometry
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The configured group. Rises in epoch with each recovery; the geometry stays."""

    epoch: int
    geometry: Geometry
    workers: tuple[WorkerReport, ...]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank as RankLoad of inference.proto has it."""

    report: WorkerReport
    is_up: bool


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is now."""

    state: EngineState
    epoch: int
    ranks: tuple[RankLoad, ...]

    num_running: int
    num_waiting: int
    num_slots: int
    max_running: int
    # Tokens kept in free slots.
    num_cached_tokens: int
    # Positions in use in busy slots, of max_total_tokens = num_slots * max_seq_len.
    num_used_tokens: int
    max_total_tokens: int
    # Prompt tokens accepted and not yet computed, waiting requests included.
    num_pending_prefill_tokens: int
    counters: Counters
    # Times that the workers were lost and came back.
    num_recoveries: int
    # Time since the last result while commands are outstanding or a recovery runs; 0 when idle.
    engine_silence_ns: int
    # Since the arrival of the request that has waited longest; 0 when none waits.
    oldest_waiting_ns: int
