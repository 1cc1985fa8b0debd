"""Penalties, biases, min_len and masks in whole commands: each row its own, and no other's."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tolerances import tolerance
from worker_driver import Driver, by_slot, free_address, on_ranks, same_bits, sampling

import reference
from checkpoints import make_checkpoint
from worker.batch import LogitAdjustment, Row, SlotSetup, StepResult

# Few, so that tokens are said again.
VOCAB_SIZE = 43
MASK_BYTES = -(-VOCAB_SIZE // 8)
SEEDED: dict[str, Any] = {"temperature": 1.2, "seed": 9}
PROMPTS = {slot: tuple(random.Random(slot).choices(range(3, 40), k=20 + slot)) for slot in range(4)}
NUM_NEW = 14
# Strong enough to change most tokens of a model that knows nothing.
ADJUSTMENTS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8, "prompt_token_ids": tuple(range(3, 40))},
    "negative": {"frequency_penalty": -2.0, "presence_penalty": -1.0},
    "biases": {"biases": ((7, 4.0), (0, 3.5), (VOCAB_SIZE - 1, 4.0), (8, -50.0))},
    "min_len": {"min_len": 30, "biases": ((5, 9.0),)},
    "all": {
        "frequency_penalty": 0.7,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.2,
        "prompt_token_ids": (4, 9, 30),
        "generated_token_ids": (41, 9, 41, 41),
        "biases": ((9, 3.0), (41, 5.0)),
        "min_len": 25,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=6, vocab_size=VOCAB_SIZE)


@pytest.fixture
def driver(folder: Path) -> Driver:
    return Driver(folder, num_slots=4, max_seq_len=64)


def setup_of(slot: int, name: str = "", **others: Any) -> SlotSetup:
    adjustment = LogitAdjustment(**ADJUSTMENTS[name]) if name else None
    parameters = {**SEEDED, "end": (5,), **others}
    return sampling(len(PROMPTS[slot]) + NUM_NEW, adjustment=adjustment, **parameters)


def mask_of(allowed: set[int]) -> bytes:
    bits = bytearray(MASK_BYTES)
    for token_id in allowed:
        bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits)


def assert_drawn_right(
    driver: Driver,
    slot: int,
    setup: SlotSetup,
    tokens: list[int],
    allowed: Sequence[set[int]] = (),
) -> None:
    """Every token of the slot's tenant is what the reference draws from the model's logits."""
    adjustment = setup.adjustment or LogitAdjustment()
    logits = driver.logits_of(slot)
    assert tokens
    for index, token_id in enumerate(tokens):
        position = len(PROMPTS[slot]) + index
        row = reference.adjusted(
            logits[position],
            position,
            frequency_penalty=adjustment.frequency_penalty,
            presence_penalty=adjustment.presence_penalty,
            repetition_penalty=adjustment.repetition_penalty,
            prompt=adjustment.prompt_token_ids,
            generated=(*adjustment.generated_token_ids, *tokens[:index]),
            biases=adjustment.biases,
            ends=setup.end_token_ids,
            min_len=adjustment.min_len,
        )
        if allowed:
            row = reference.masked(row, allowed[index])
        wanted = reference.sample(row, setup.temperature, 0, 1.0, 0.0, setup.seed, position)
        assert token_id == wanted, f"token {index}"


def run_all(driver: Driver, setups: dict[int, SlotSetup], num_steps: int) -> dict[int, list[int]]:
    """All at once: one prompt in two chunks, the others beside it."""
    slots = list(setups)
    first, tokens = slots[0], defaultdict(list)

    def note(result: StepResult) -> int:
        for row in result.rows:
            tokens[row.slot] += row.token_ids
        return sum(len(row.token_ids) for row in result.rows)

    head = driver.first_chunk(first, PROMPTS[first][:7], setups[first], sample=False)
    others = [driver.first_chunk(slot, PROMPTS[slot], setups[slot]) for slot in slots[1:]]
    note(driver.run(head, *others))
    note(driver.run(*map(driver.decode, slots[1:]), driver.chunk(first, 7, PROMPTS[first][7:])))
    while note(driver.run(*map(driver.decode, slots), num_steps=num_steps)):
        pass
    return tokens


@pytest.mark.parametrize("name", ADJUSTMENTS)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_row_alone_and_among_others(
    folder: Path, driver: Driver, name: str, temperature: float
) -> None:
    alone = Driver(folder, num_slots=4, max_seq_len=64)
    names = ["", name, "all", name]
    setups = {slot: setup_of(slot, names[slot], temperature=temperature) for slot in range(4)}
    together = run_all(driver, setups, 3)
    for slot, setup in setups.items():
        assert_drawn_right(driver, slot, setup, together[slot])
        assert run_all(alone, {slot: setup}, 1)[slot] == together[slot]
        for position, row in alone.logits_of(slot).items():
            assert same_bits(driver.logits_of(slot)[position], row)


@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_it_changes_what_is_said(driver: Driver, name: str) -> None:
    """Else the tests above would show nothing."""
    plain, adjusted = (
        [run_all(driver, {slot: setup_of(slot, which)}, 4)[slot] for slot in range(4)]
        for which in ("", name)
    )
    assert sum(left != right for left, right in zip(plain, adjusted, strict=True)) > 1


def test_an_end_only_from_min_len_on(driver: Driver) -> None:
    """The likeliest token by far ends the sequence; it comes once those before it suffice."""
    for slot in range(4):
        setup = sampling(60, end=(5,), adjustment=LogitAdjustment(biases=((5, 99.0),), min_len=30))
        tokens = run_all(driver, {slot: setup}, 4)[slot]
        assert tokens.index(5) == len(tokens) - 1
        assert len(PROMPTS[slot]) + len(tokens) == 31


def test_goes_on_after_a_rebuild(folder: Path, driver: Driver) -> None:
    """The rest is the same when what was generated comes with the prompt and in the set-up."""
    setup = setup_of(1, "all")
    tokens = run_all(driver, {1: setup}, 3)[1]
    assert len(tokens) > 6
    for done in (1, 4):
        fields = {**ADJUSTMENTS["all"]}
        fields["generated_token_ids"] += tuple(tokens[:done])
        again = sampling(
            len(PROMPTS[1]) + NUM_NEW, end=(5,), adjustment=LogitAdjustment(**fields), **SEEDED
        )
        rebuilt = driver.first_chunk(2, (*PROMPTS[1], *tokens[:done]), again)
        rest = list(driver.run(rebuilt).rows[0].token_ids)
        rest += driver.run(driver.decode(2), num_steps=NUM_NEW).rows[0].token_ids
        assert rest == tokens[done:]


def test_logprobs_are_of_the_logits_before(driver: Driver) -> None:
    allowed = tolerance("logprobs")
    setup = setup_of(0, "all", num_logprobs=3, masked=True)
    only = mask_of(set(range(20, 30)))
    rows = [driver.run(driver.first_chunk(0, PROMPTS[0], setup, allowed_tokens=only)).rows[0]]
    rows += [driver.run(driver.decode(0, only)).rows[0] for _ in range(3)]
    for index, row in enumerate(rows):
        logits = driver.logits_of(0)[len(PROMPTS[0]) + index]
        logprob, rank, ids, logprobs = reference.logprobs(logits, row.token_ids[0], 3)
        (got,) = row.logprobs
        assert (got.rank, list(got.best_token_ids)) == (rank, ids)
        assert [got.logprob, *got.best_logprobs] == pytest.approx(
            [logprob, *logprobs], rel=allowed.relative, abs=allowed.absolute
        )


def masked_game(driver: Driver) -> tuple[dict[int, list[int]], list[int]]:
    """0 and 1 masked, each with sets of its own, 1 adjusted too, 2 adjusted, 3 free."""
    rng = random.Random(2)
    setups = {0: setup_of(0, masked=True), 1: setup_of(1, "all", masked=True)}
    setups |= {2: setup_of(2, "frequency"), 3: setup_of(3)}
    tokens: dict[int, list[int]] = defaultdict(list)
    sets: dict[int, list[set[int]]] = defaultdict(list)

    def mask(slot: int) -> bytes:
        sets[slot].append({i for i in range(slot, VOCAB_SIZE, 2) if rng.random() < 0.4})
        return mask_of(sets[slot][-1])

    def run(*rows: Row, num_steps: int = 1) -> StepResult:
        result = driver.run(*rows, num_steps=num_steps)
        for row in result.rows:
            tokens[row.slot] += row.token_ids
        return result

    digests = [
        run(
            driver.first_chunk(3, PROMPTS[3], setups[3]),
            driver.first_chunk(0, PROMPTS[0], setups[0], allowed_tokens=mask(0)),
            driver.first_chunk(1, PROMPTS[1][:9], setups[1], sample=False),
            driver.first_chunk(2, PROMPTS[2], setups[2]),
        ).digest
    ]
    last = driver.chunk(1, 9, PROMPTS[1][9:], allowed_tokens=mask(1))
    digests.append(run(driver.decode(0, mask(0)), driver.decode(3), last).digest)
    for num_steps in (1, 3, 2, 3):
        result = run(
            driver.decode(1, mask(1)),
            driver.decode(2),
            driver.decode(0, mask(0)),
            driver.decode(3),
            num_steps=num_steps,
        )
        digests.append(result.digest)
        counts = {row.slot: len(row.token_ids) for row in result.rows}
        assert counts == {0: 1, 1: 1, 2: num_steps, 3: num_steps}
    for slot in range(4):
        allowed = sets[slot]
        assert_drawn_right(driver, slot, setups[slot], tokens[slot], allowed)
        for token_id, those in zip(tokens[slot], allowed, strict=bool(allowed)):
            assert token_id in those
    return tokens, digests


def test_masked_rows_among_free_ones(folder: Path, driver: Driver) -> None:
    """A masked row draws one token a command, from its own set; free rows do not notice."""
    tokens, _ = masked_game(driver)
    alone = Driver(folder, num_slots=4, max_seq_len=64)
    for slot, name in ((2, "frequency"), (3, "")):
        whole = run_all(alone, {slot: setup_of(slot, name)}, 5)[slot]
        assert tokens[slot] == whole[: len(tokens[slot])]


def test_a_mask_of_everything_changes_nothing(driver: Driver) -> None:
    plain = driver.generate(PROMPTS[0], 8, **SEEDED)
    setup = sampling(len(PROMPTS[0]) + 8, masked=True, **SEEDED)
    # Bits past the vocabulary are not looked at.
    full = b"\xff" * MASK_BYTES
    tokens = list(
        driver.run(driver.first_chunk(1, PROMPTS[0], setup, allowed_tokens=full)).rows[0].token_ids
    )
    while (row := driver.run(driver.decode(1, full), num_steps=8).rows[0]).token_ids:
        assert len(row.token_ids) == 1
        tokens += row.token_ids
    assert tokens == plain


def test_a_mask_of_nothing_ends_the_row_alone(folder: Path, driver: Driver) -> None:
    nothing = bytes(MASK_BYTES)
    masked = setup_of(0, masked=True)
    some = mask_of({11, 12})
    driver.run(
        driver.first_chunk(0, PROMPTS[0], masked, allowed_tokens=some),
        driver.first_chunk(3, PROMPTS[3], setup_of(3)),
    )
    rows = by_slot(driver.run(driver.decode(0, nothing), driver.decode(3), num_steps=3))
    assert (rows[0].corrupted, rows[0].token_ids) == (True, ())
    assert len(rows[3].token_ids) == 3
    rows = by_slot(driver.run(driver.decode(0, some), driver.decode(3)))
    assert (rows[0].corrupted, rows[0].token_ids) == (False, ())
    plain = run_all(Driver(folder, num_slots=4, max_seq_len=64), {3: setup_of(3)}, 1)[3]
    row = driver.run(driver.decode(3), num_steps=NUM_NEW).rows[0]
    assert list(row.token_ids) == plain[5:]


def test_on_two_ranks(tmp_path: Path) -> None:
    """The vocabulary is divided unevenly; ranks draw the same, and from the same sets."""
    folder = make_checkpoint(tmp_path, "qwen3", seed=6, vocab_size=VOCAB_SIZE)
    address = free_address()

    def work(rank: int) -> Any:
        ranks = {"rank": rank, "world_size": 2, "rendezvous_address": address}
        driver = Driver(folder, num_slots=4, max_seq_len=64, **ranks)
        game = masked_game(driver)
        setups = {slot: setup_of(slot, name) for slot, name in enumerate(list(ADJUSTMENTS)[3:])}
        tokens = run_all(driver, setups, 3)
        for slot, setup in setups.items():
            assert_drawn_right(driver, slot, setup, tokens[slot])
        return game, tokens

    left, right = on_ranks(2, work)
    assert left == right
