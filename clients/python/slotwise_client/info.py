"""What a server says about itself. Fields mirror the messages of `inference.proto` by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; None where the server leaves one unset."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model, its limits and its default sampling."""

    name: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    max_seq_len: int
    max_prompt_tokens: int
    end_token_ids: tuple[int, ...]
    bos_token_id: int | None
    has_chat_template: bool
    default_sampling: Sampling
    fingerprint: str
    output_format: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """One claim that a worker checked at start."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Worker:
    """One tensor-parallel rank."""

    rank: int
    address: str
    device: str
    weight_dtype: str
    kv_dtype: str
    predicted_memory_bytes: int
    measured_memory_bytes: int
    self_tests: tuple[SelfTest, ...]
    num_threads: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What an answer's bits depend on besides its request: equal set-ups give equal tokens."""

    fingerprint: str
    version: str
    build: str
    weight_dtype: str
    kv_dtype: str
    device_name: str
    world_size: int
    front: str


class JournalState(StrEnum):
    """FAILING: it cannot be written. UNSPECIFIED stands for a state this client does not know."""

    UNSPECIFIED = "unspecified"
    OFF = "off"
    ON = "on"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """How the server is set up."""

    version: str
    num_slots: int
    max_seq_len: int
    max_queue_len: int
    max_step_tokens: int
    supports_batch: bool
    epoch: int
    workers: tuple[Worker, ...]
    uptime_ns: int
    max_running: int
    prefix_reuse: str
    setup: Setup
    retention_ms: int
    max_attach_window_ms: int
    journal: JournalState


@dataclass(frozen=True, slots=True)
class Counters:
    """Requests since start, by how they ended or why they were refused."""

    accepted: int
    stop: int
    length: int
    cancelled: int
    deadline: int
    error: int
    rejected_invalid: int
    rejected_full: int
    rejected_unavailable: int
    poisoned: int
    slow_reader: int
    corrupted: int


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """What the prefix cache did since start, in tokens of prompts and in events."""

    num_queried_tokens: int
    num_hit_tokens: int
    num_hits: int
    num_copies: int
    num_copied_tokens: int
    num_evictions: int
    num_evicted_tokens: int
    num_cached_tokens: int


class ServerState(StrEnum):
    """UNSPECIFIED stands for a state this client does not know."""

    UNSPECIFIED = "unspecified"
    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DOWN = "down"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One tensor-parallel rank now. device_memory_bytes 0: not known."""

    rank: int
    device: str
    is_up: bool
    memory_bytes: int
    device_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a time in seconds fell into which bucket, since start.

    `counts` has one more than `upper_bounds_s`: what is beyond the last bound. Empty both when the
    server tells none.
    """

    upper_bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float | None:
        """None when it counts nothing."""
        return self.sum_s / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """The time below which the share q (0 to 1) lies, linear within a bucket, as Prometheus'
        histogram_quantile; the last bound for what is beyond it. None when it counts nothing."""
        wanted, seen, lower_s = q * self.count, 0, 0.0
        if not self.count:
            return None
        for upper_s, number in zip(self.upper_bounds_s, self.counts, strict=False):
            if number and seen + number >= wanted:
                return lower_s + (upper_s - lower_s) * max(0.0, wanted - seen) / number
            seen, lower_s = seen + number, upper_s
        return lower_s

    def __sub__(self, earlier: "Histogram") -> "Histogram":
        """What came since `earlier`; all of it where the server was restarted since."""
        counts = tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=False))
        if self.upper_bounds_s != earlier.upper_bounds_s or min(counts, default=0) < 0:
            return self
        return Histogram(self.upper_bounds_s, counts, self.sum_s - earlier.sum_s)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times of all requests since start, as `inference.proto` defines them."""

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    e2e_request_latency: Histogram
    request_queue_time: Histogram
    request_prefill_time: Histogram
    request_decode_time: Histogram
    request_inference_time: Histogram


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is."""

    num_running: int
    num_waiting: int
    num_slots: int
    num_used_tokens: int
    max_total_tokens: int
    num_pending_prefill_tokens: int
    requests: Counters
    num_prompt_tokens: int
    num_generated_tokens: int
    engine_silence_ns: int
    num_steps: int
    prefill_step_ns: int
    decode_step_ns: int
    max_running: int
    prefix_cache: PrefixCache
    num_unread: int
    num_recoveries: int
    num_resumed: int
    state: ServerState
    epoch: int
    ranks: tuple[RankLoad, ...]
    latencies: Latencies
    oldest_waiting_ns: int
    uptime_ns: int

    @property
    def oldest_waiting_s(self) -> float:
        return self.oldest_waiting_ns / 1e9

    @property
    def uptime_s(self) -> float:
        return self.uptime_ns / 1e9


class SlotState(StrEnum):
    """UNSPECIFIED stands for a state this client does not know."""

    UNSPECIFIED = "unspecified"
    FREE = "free"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Slot:
    """One seat of the slot table."""

    index: int
    generation: int
    state: SlotState
    request_id: str | None
    num_computed_tokens: int
    prompt_tokens: int
    generated_tokens: int
    num_cached_tokens: int
    choice_index: int


class Health(StrEnum):
    """Answer of `grpc.health.v1`. UNKNOWN_SERVICE: the server has no service of that name (yet)."""

    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNKNOWN_SERVICE = "unknown_service"
