"""Shares of the ranks: everything is held, once, or replicated where it must be."""

from __future__ import annotations

import pytest

from worker.errors import SetupError
from worker.model_config import ModelConfig, parse_model_config
from worker.sharding import possible_sizes, shard_of, vocab_parts


def config(heads: int, kv_heads: int, inter: int = 1536, vocab: int = 49152) -> ModelConfig:
    return parse_model_config(
        {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": heads * 8,
            "intermediate_size": inter,
            "vocab_size": vocab,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
        }
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_demo_model(world_size: int) -> None:
    shards = [shard_of(config(9, 3), rank, world_size) for rank in range(world_size)]
    assert [h for s in shards for h in range(s.q_heads.begin, s.q_heads.end)] == list(range(9))
    assert sum(shard.intermediate.size for shard in shards) == 1536
    assert sum(shard.vocab.size for shard in shards) == 49152
    assert [shard.adds_bias for shard in shards].count(True) == 1
    for shard in shards:
        # A query head's KV head (three share one) must be on its rank.
        for head in range(shard.q_heads.begin, shard.q_heads.end):
            assert shard.kv_heads.begin <= head // 3 < shard.kv_heads.end


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size"), [(8, 2, 8), (8, 2, 4), (12, 4, 2), (12, 4, 3)]
)
def test_kv_heads_follow_their_queries(heads: int, kv_heads: int, world_size: int) -> None:
    group = heads // kv_heads
    for rank in range(world_size):
        shard = shard_of(config(heads, kv_heads), rank, world_size)
        for head in range(shard.q_heads.begin, shard.q_heads.end):
            assert shard.kv_heads.begin <= head // group < shard.kv_heads.end
        # The kernel maps local query head i to local KV head i // (local group).
        assert shard.q_heads.size % shard.kv_heads.size == 0


def test_uneven_vocabulary_and_feed_forward() -> None:
    uneven = config(4, 4, inter=101, vocab=103)
    parts = vocab_parts(uneven, 4)
    assert [part.size for part in parts] == [25, 26, 26, 26]
    assert parts[0].begin == 0
    assert parts[-1].end == 103
    assert sum(shard_of(uneven, rank, 4).intermediate.size for rank in range(4)) == 101


def test_refused_with_the_sizes_that_work() -> None:
    with pytest.raises(SetupError, match=r"9 query heads and 3 KV heads.*4 ranks.*: 1, 2, 3, 9"):
        shard_of(config(9, 3), 0, 4)
    assert possible_sizes(config(12, 4)) == [1, 2, 3, 4, 12]
    with pytest.raises(SetupError, match="rank 2"):
        shard_of(config(4, 4), 2, 2)
