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
