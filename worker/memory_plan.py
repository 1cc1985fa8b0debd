"""How much memory a rank will take, reckoned before anything is loaded.

Everything a rank allocates is counted here: weights, the slot cache, rotation tables, workspace.
What a step needs is allocated once; nothing grows while serving.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from worker.errors import MemoryPlanError
from worker.model_config import ModelConfig
from worker.sharding import Shard

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LENGTH_GRID = 128


@dataclass(frozen=True, slots=True)
class Footprint:
    """How a device uses memory beside weights and slots.

    Forwards run in multiples of `row_grid` rows. `row_table`: the table of rows that decode is in
    its memory, with penalties, biases and masks, and all of them are rows of a forward that
    decodes, beside its chunks. Activations are float32, or of the weights' type; attention keeps a
    float32 state per head and `attention_tile` positions of every such row (0: none).
    `reserve_bytes`: rounding by the allocator and what libraries take; `group_bytes`: what joining
    other ranks takes.
    """

    row_grid: int
    row_table: bool
    float32_activations: bool
    attention_tile: int
    reserve_bytes: int
    group_bytes: int


CPU_FOOTPRINT = Footprint(1, False, True, 0, 8 << 20, 0)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What was asked for: S slots of P positions, rows of a forward, and the precisions.

    `max_running` slots, at most, have a tenant at a time: the rows that decode.
    """

    num_slots: int
    max_seq_len: int
    max_step_tokens: int
    weight_dtype: str
    kv_dtype: str
    max_running: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, for one rank. `total_bytes`: what the device has in all."""

    baseline_bytes: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    available_bytes: int
    limits: ServingLimits
    kv_bytes_per_position: int
    total_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What has still to be allocated."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def predicted_bytes(self) -> int:
        """Resident memory of the process when it serves."""
        return self.baseline_bytes + self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether it can be allocated now."""
        return self.needed_bytes <= self.available_bytes

    def as_dict(self) -> dict[str, object]:
        """For JSON: the fields and what follows from them."""
        derived = {
            "needed_bytes": self.needed_bytes,
            "predicted_bytes": self.predicted_bytes,
            "fits": self.fits,
            "largest_fitting": [list(pair) for pair in largest_fitting(self)],
        }
        return {**asdict(self), **derived}


def plan_memory(
    config: ModelConfig,
    shard: Shard,
    limits: ServingLimits,
    baseline: int,
    available: int,
    total: int,
    footprint: Footprint = CPU_FOOTPRINT,
) -> MemoryPlan:
    """The plan for one rank.

    `baseline`: resident bytes before loading; `available`: bytes free of the device's `total`.
    """
    per_position = (
        config.num_layers * 2 * shard.kv_heads.size * config.head_dim * DTYPE_BYTES[limits.kv_dtype]
    )
    return MemoryPlan(
        baseline_bytes=baseline,
        weight_bytes=weight_bytes(config, shard, limits.weight_dtype),
        kv_bytes=limits.num_slots * limits.max_seq_len * per_position,
        workspace_bytes=_workspace_bytes(config, shard, limits, footprint),
        available_bytes=available,
        limits=limits,
        kv_bytes_per_position=per_position,
        total_bytes=total,
    )


def check_fits(plan: MemoryPlan) -> None:
    """Raises MemoryPlanError with the arithmetic and the largest settings that fit."""
    if plan.fits:
        return
    limits = plan.limits
    options = largest_fitting(plan)
    advice = (
        "fits: " + ", or ".join(f"{slots} slots x {length}" for slots, length in options)
        if options
        else "no number of slots fits; take a smaller model, bfloat16 weights or more ranks"
    )
    raise MemoryPlanError(
        f"{limits.num_slots} slots x {limits.max_seq_len} positions need "
        f"{_mib(plan.needed_bytes)}: weights {_mib(plan.weight_bytes)} + KV "
        f"{limits.num_slots} x {limits.max_seq_len} x {plan.kv_bytes_per_position:,} bytes = "
        f"{_mib(plan.kv_bytes)} + workspace {_mib(plan.workspace_bytes)}; "
        f"available: {_mib(plan.available_bytes)} of {_mib(plan.total_bytes)} (the rest is in use "
        f"or kept free); {advice}"
    )


def largest_fitting(plan: MemoryPlan) -> list[tuple[int, int]]:
    """(slots, positions) that fit: most slots of the asked length, longest for the asked slots."""
    limits = plan.limits
    free = plan.available_bytes - plan.weight_bytes - plan.workspace_bytes
    positions = max(0, free) // plan.kv_bytes_per_position
    slots = min(limits.num_slots, positions // limits.max_seq_len)
    length = min(limits.max_seq_len, positions // limits.num_slots)
    if length < limits.max_seq_len:
        length -= length % _LENGTH_GRID
    pairs = [(slots, limits.max_seq_len), (limits.num_slots, length)]
    return list(dict.fromkeys(pair for pair in pairs if pair[0] and pair[1]))


def beside(plan: MemoryPlan, others_bytes: int) -> MemoryPlan:
    """The plan of a rank whose machine must also hold `others_bytes` of other ranks."""
    return replace(plan, available_bytes=max(0, plan.available_bytes - others_bytes))


def without_weights(plan: MemoryPlan) -> MemoryPlan:
    """The plan of a rank that has the weights already: they are part of its baseline."""
    return replace(
        plan,
        baseline_bytes=plan.baseline_bytes - plan.weight_bytes,
        available_bytes=(plan.available_bytes + plan.weight_bytes),
    )


def weight_bytes(config: ModelConfig, shard: Shard, dtype: str) -> int:
    """Bytes of the rank's parameters: matrices in `dtype`, biases and norms in float32."""
    hidden, head_dim = config.hidden_size, config.head_dim
    qkv_rows = (shard.q_heads.size + 2 * shard.kv_heads.size) * head_dim
    inter = shard.intermediate.size
    matrix = hidden * (qkv_rows + shard.q_heads.size * head_dim + 3 * inter)
    vectors = 2 * hidden + (2 * head_dim if config.qk_norm else 0)
    vectors += qkv_rows if config.qkv_bias else 0
    vectors += hidden if config.o_bias else 0
    vectors += (2 * inter + hidden) if config.mlp_bias else 0
    embeddings = (1 if config.tie_word_embeddings else 2) * shard.vocab.size * hidden
    elements = config.num_layers * matrix + embeddings
    return elements * DTYPE_BYTES[dtype] + (config.num_layers * vectors + hidden) * 4


def _workspace_bytes(
    config: ModelConfig, shard: Shard, limits: ServingLimits, footprint: Footprint
) -> int:
    width = 4 if footprint.float32_activations else DTYPE_BYTES[limits.weight_dtype]
    heads = shard.q_heads.size + 2 * shard.kv_heads.size
    hidden = config.hidden_size
    # The residual and the logits are float32 everywhere.
    row = 2 * hidden + (heads + shard.q_heads.size) * config.head_dim
    row = 4 * hidden + width * (row + 3 * shard.intermediate.size)
    sample_row = row + 4 * config.vocab_size
    if shard.world_size > 1:
        widest = -(-config.vocab_size // shard.world_size)
        row += 4 * shard.world_size * hidden
        sample_row += 4 * (shard.world_size + 1) * widest
    tables = 4 * limits.max_seq_len * config.head_dim
    rows, sampled, vocab = limits.max_step_tokens, limits.max_running, config.vocab_size
    if footprint.row_table:
        # Counts, biases and a mask a row; logits are adjusted in a copy.
        tables += limits.max_running * (8 * vocab + 4 * -(-vocab // 32))
        sample_row += 4 * vocab
        rows, sampled = rows + limits.max_running, 2 * sampled
    grid = footprint.row_grid
    total = _on_grid(rows, grid) * row + _on_grid(sampled, grid) * sample_row + tables
    if footprint.attention_tile:
        tiles = -(-limits.max_seq_len // footprint.attention_tile)
        total += 4 * limits.max_running * shard.q_heads.size * tiles * (config.head_dim + 2)
    group = footprint.group_bytes if shard.world_size > 1 else 0
    return total + footprint.reserve_bytes + group


def _on_grid(count: int, grid: int) -> int:
    return -(-count // grid) * grid


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
