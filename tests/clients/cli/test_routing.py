from __future__ import annotations

import math
import random
from collections import Counter

from slotwise_cli.routing import HashRouter, LeastRouter, RandomRouter

KEYS = range(20_000)


def test_a_key_stays_where_it_is():
    router = HashRouter(10, math.inf)
    chosen = [router.choose(key, [0] * 10, [True] * 10) for key in KEYS]
    assert chosen == [router.choose(key, [0] * 10, [True] * 10) for key in KEYS]
    # 64 places each: shares within some 12 % of the mean, one standard deviation.
    counts = Counter(chosen)
    assert len(counts) == 10
    assert max(counts.values()) < 1.5 * len(KEYS) / 10


def test_a_lost_replica_moves_its_keys_alone():
    router, up = HashRouter(10, math.inf), [True] * 10
    before = [router.choose(key, [0] * 10, up) for key in KEYS]
    down = [one != 4 for one in range(10)]
    after = [router.choose(key, [0] * 10, down) for key in KEYS]
    assert all(a == b for a, b in zip(before, after, strict=True) if a != 4)
    assert 4 not in after


def test_a_new_replica_takes_about_its_share():
    ten, eleven = HashRouter(10, math.inf), HashRouter(11, math.inf)
    moved = [
        new
        for key in KEYS
        if (new := eleven.choose(key, [0] * 11, [True] * 11))
        != ten.choose(key, [0] * 10, [True] * 10)
    ]
    assert set(moved) == {10}
    assert 0.5 / 11 < len(moved) / len(KEYS) < 1.5 / 11


def test_no_replica_has_more_than_its_bound():
    """All ask for one key, and nobody ends."""
    router, loads = HashRouter(10, 1.25), [0] * 10
    for _ in range(1000):
        loads[router.choose(7, loads, [True] * 10)] += 1
        assert max(loads) <= math.ceil(1.25 * sum(loads) / 10)


def test_the_least_loaded_one():
    router = LeastRouter(random.Random(1))
    assert router.choose(0, [3, 1, 2], [True] * 3) == 1
    assert router.choose(0, [3, 1, 2], [True, False, True]) == 2
    assert {router.choose(0, [1, 1, 1], [True] * 3) for _ in range(50)} == {0, 1, 2}


def test_nobody_is_up():
    for router in (
        HashRouter(2, 1.25),
        LeastRouter(random.Random(1)),
        RandomRouter(random.Random(1)),
    ):
        assert router.choose(1, [0, 0], [False, False]) is None
