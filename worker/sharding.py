"""Which part of the model a rank holds.

A KV head and the query heads that read it stay together: whole groups are dealt out as evenly as
they go. With fewer KV heads than ranks, each is replicated and its query heads are split. The
feed-forward size and the vocabulary are cut into contiguous parts of nearly equal sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.errors import SetupError
from worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Part:
    """The half-open range [begin, end) of a dimension."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    def scaled(self, factor: int) -> Part:
        """The same range of a dimension in which each element takes `factor` places."""
        return Part(self.begin * factor, self.end * factor)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share of every split dimension."""

    rank: int
    world_size: int
    q_heads: Part
    kv_heads: Part
    intermediate: Part
    vocab: Part

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias of a product whose parts are summed over ranks."""
        return self.rank == 0


def shard_of(config: ModelConfig, rank: int, world_size: int) -> Shard:
    """The share of `rank`. Raises SetupError naming the sizes that work if this one does not."""
    if not 0 <= rank < world_size:
        raise SetupError(f"rank {rank} is not in [0, {world_size})")
    if not _divides(config, world_size):
        raise SetupError(
            f"{config.num_heads} query heads and {config.num_kv_heads} KV heads cannot be split "
            f"over {world_size} ranks; possible: {', '.join(map(str, possible_sizes(config)))}"
        )
    kv_heads = _kv_heads(config, rank, world_size)
    return Shard(
        rank=rank,
        world_size=world_size,
        q_heads=_q_heads(config, kv_heads, rank, world_size),
        kv_heads=kv_heads,
        intermediate=_part(config.intermediate_size, rank, world_size),
        vocab=_part(config.vocab_size, rank, world_size),
    )


def vocab_parts(config: ModelConfig, world_size: int) -> list[Part]:
    """The vocabulary range of every rank, in order."""
    return [_part(config.vocab_size, rank, world_size) for rank in range(world_size)]


def possible_sizes(config: ModelConfig) -> list[int]:
    """World sizes that the model can be split over, rising."""
    return [size for size in range(1, config.num_heads + 1) if _divides(config, size)]


def _kv_heads(config: ModelConfig, rank: int, world_size: int) -> Part:
    if config.num_kv_heads >= world_size:
        return _part(config.num_kv_heads, rank, world_size)
    head = rank * config.num_kv_heads // world_size
    return Part(head, head + 1)


def _q_heads(config: ModelConfig, kv_heads: Part, rank: int, world_size: int) -> Part:
    if config.num_kv_heads >= world_size:
        return kv_heads.scaled(config.num_heads // config.num_kv_heads)
    return _part(config.num_heads, rank, world_size)


def _divides(config: ModelConfig, world_size: int) -> bool:
    if world_size > min(config.intermediate_size, config.vocab_size):
        return False
    if config.num_kv_heads >= world_size:
        return True
    return world_size % config.num_kv_heads == 0 and config.num_heads % world_size == 0


def _part(size: int, rank: int, world_size: int) -> Part:
    return Part(size * rank // world_size, size * (rank + 1) // world_size)
