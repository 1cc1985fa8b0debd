"""More slots than rows that decode: prefixes, adjusted and masked rows, logprobs of prompts.

The same bits as a cold run, in any slot, row and company; tokens as the CPU's sampler draws them
from the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu_driver import DEVICE, SHAPE, VOCAB_SIZE, GpuDriver, needs_gpus, prompt_of
from tolerances import tolerance
from worker_driver import by_slot, same_bits, sampling

import reference
from checkpoints import make_checkpoint
from worker import _native
from worker.batch import LogitAdjustment, Row, SlotSetup, TokenLogprobs
from worker.sampler import Sampler

pytestmark = [pytest.mark.gpu, needs_gpus()]

SLOTS, ROWS = 12, 4
MAX_LEN = 1024
PROMPT = prompt_of(1, 420)
NUM_NEW = 12
SEEDED: dict[str, Any] = {"temperature": 1.2, "top_k": 300, "seed": 2**63 + 5}
# Around tiles of 128 positions; and 128, 64, 32 and 16 rows, which are the most of a graph.
BORDERS = (1, 2, 127, 128, 129, 255, 256, 257, 418, 419, 291, 292, 355, 356, 387, 388, 404)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GpuDriver:
    directory = tmp_path_factory.mktemp("model")
    folder = make_checkpoint(
        directory, "qwen3", seed=5, dtype=request.param, device=DEVICE, **SHAPE
    )
    return GpuDriver(
        folder, num_slots=SLOTS, max_running=ROWS, max_seq_len=MAX_LEN, max_step_tokens=1024
    )


@pytest.fixture
def driver(shared: GpuDriver) -> Iterator[GpuDriver]:
    """Each test begins with slots that hold nothing but NaN."""
    shared.enter()
    shared.watched = True
    shared.logits.clear()
    cache = shared.decoder.cache
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    yield shared
    for slot in range(SLOTS):
        cache.clear(slot)


@dataclass(frozen=True)
class Cold:
    """A prompt alone: its tokens, and logits by position."""

    tokens: list[int]
    logits: dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def colds(shared: GpuDriver) -> dict[tuple[int, ...], Cold]:
    """Runs made so far."""
    return {}


def cold(
    driver: GpuDriver, colds: dict[tuple[int, ...], Cold], prompt: tuple[int, ...] = PROMPT
) -> Cold:
    """In slot 0, which takes nothing over; the slot is NaN again behind it."""
    if prompt not in colds:
        tokens = driver.generate(prompt, NUM_NEW, 0, **SEEDED)
        colds[prompt] = Cold(tokens, driver.logits_of(0))
        for tensor in (*driver.decoder.cache.keys, *driver.decoder.cache.values):
            tensor[0].fill_(torch.nan)
    return colds[prompt]


def setup_of(prompt: tuple[int, ...], **others: Any) -> SlotSetup:
    return sampling(len(prompt) + NUM_NEW, **{**SEEDED, **others})


def assert_cold(driver: GpuDriver, slot: int, tokens: list[int], wanted: Cold) -> None:
    """The slot's tenant gave the tokens, and the bits of all logits that were seen."""
    assert tokens == wanted.tokens
    logits = driver.logits_of(slot)
    assert logits.keys() == wanted.logits.keys()
    for position, row in wanted.logits.items():
        assert same_bits(logits[position], row), f"logits differ at position {position}"


def warm(
    driver: GpuDriver,
    slot: int,
    source: int,
    length: int,
    prompt: tuple[int, ...] = PROMPT,
    *beside: Row,
) -> list[int]:
    """All tokens of the prompt in `slot`, behind `length` positions of `source`."""
    row = driver.first_chunk(
        slot, prompt[length:], setup_of(prompt), source=source, num_cached=length
    )
    return finish(driver, slot, list(by_slot(driver.run(*beside, row))[slot].token_ids))


def finish(driver: GpuDriver, slot: int, tokens: list[int]) -> list[int]:
    while found := driver.run(driver.decode(slot)).rows[0].token_ids:
        tokens += found
    return tokens


Colds = dict[tuple[int, ...], Cold]


@pytest.mark.parametrize("watched", [True, False])
def test_any_slot_in_any_row(driver: GpuDriver, colds: Colds, watched: bool) -> None:
    """Four tenants in slots that are not their rows; one is replaced while the others go on."""
    wanted = cold(driver, colds)
    driver.watched = watched
    slots = (11, 4, 9, 2)
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    for count, slot in enumerate(slots):
        rows: list[Row] = [driver.decode(other) for other in slots[:count]]
        rows.append(driver.first_chunk(slot, PROMPT, setup_of(PROMPT)))
        for found, row in by_slot(driver.run(*rows)).items():
            tokens[found] += row.token_ids
    # Slot 1 has the row of slot 9.
    noise = driver.first_chunk(1, prompt_of(5, 60), sampling(MAX_LEN, temperature=1.0))
    others = [driver.decode(slot) for slot in (2, 11, 4)]
    for row in driver.run(*others, noise).rows[:3]:
        tokens[row.slot] += row.token_ids
    for _ in range(NUM_NEW):
        for row in driver.run(driver.decode(1), *others).rows[1:]:
            tokens[row.slot] += row.token_ids
    for slot in (11, 4, 2):
        assert_cold(driver, slot, tokens[slot], wanted)
    assert tokens[9] == wanted.tokens[:2]


@pytest.mark.parametrize("length", BORDERS)
def test_a_prefix_of_another_slot_and_of_the_own(
    driver: GpuDriver, colds: Colds, length: int
) -> None:
    wanted = cold(driver, colds)
    assert driver.generate(PROMPT, NUM_NEW, 7, **SEEDED) == wanted.tokens
    assert_cold(driver, 6, warm(driver, 6, 7, length), wanted)
    assert_cold(driver, 7, warm(driver, 7, 7, length), wanted)
    # A copy of a copy.
    assert_cold(driver, 0, warm(driver, 0, 6, length), wanted)


@pytest.mark.parametrize("num_generated", [1, 5, NUM_NEW - 1])
def test_a_prefix_that_was_generated(driver: GpuDriver, colds: Colds, num_generated: int) -> None:
    first = cold(driver, colds)
    grown = (*PROMPT, *first.tokens[:num_generated], 77, 78)
    wanted = cold(driver, colds, grown)
    driver.generate(PROMPT, NUM_NEW, 10, **SEEDED)
    length = len(PROMPT) + num_generated
    assert_cold(driver, 3, warm(driver, 3, 10, length, grown), wanted)
    assert_cold(driver, 10, warm(driver, 10, 10, length, grown), wanted)


def test_a_prefix_of_a_slot_that_goes_on(driver: GpuDriver, colds: Colds) -> None:
    """B27: neither sees the other, whoever ends first; the source is then taken by another."""
    wanted = cold(driver, colds)
    grown = (*PROMPT[:300], *prompt_of(9, 50))
    other = cold(driver, colds, grown)
    tokens = list(driver.run(driver.first_chunk(5, PROMPT, setup_of(PROMPT))).rows[0].token_ids)
    tokens += driver.run(driver.decode(5)).rows[0].token_ids
    joining = driver.first_chunk(8, grown[300:], setup_of(grown), source=5, num_cached=300)
    first, second = driver.run(driver.decode(5), joining).rows
    tokens += first.token_ids
    copied = list(second.token_ids)
    for row in driver.run(driver.decode(8), driver.decode(5), num_steps=1).rows:
        (copied if row.slot == 8 else tokens).extend(row.token_ids)
    noise = driver.first_chunk(5, prompt_of(4, 500), sampling(MAX_LEN))
    copied += driver.run(driver.decode(8), noise).rows[0].token_ids
    assert tokens == wanted.tokens[:4]
    assert_cold(driver, 8, finish(driver, 8, copied), other)


@pytest.mark.parametrize("computed", [100, 128, 300])
def test_a_prompt_that_was_given_up(driver: GpuDriver, colds: Colds, computed: int) -> None:
    """B13: what its chunks have written is a prefix, again and again, and no more of it."""
    wanted = cold(driver, colds)
    driver.run(driver.first_chunk(3, PROMPT[:60], setup_of(PROMPT), sample=False))
    driver.run(driver.chunk(3, 60, PROMPT[60:computed], sample=False))
    for slot in (5, 6, 3, 3, 8):
        assert_cold(driver, slot, warm(driver, slot, 3, computed), wanted)
        if slot != 3:
            # Given up anew: the next one takes it over in the same slot.
            again = driver.first_chunk(
                slot, PROMPT[50:computed], setup_of(PROMPT), sample=False, source=3, num_cached=50
            )
            driver.run(again)
            driver.logits.clear()
            assert_cold(driver, slot, warm(driver, slot, slot, computed), wanted)


def test_commands_that_overlap(driver: GpuDriver, colds: Colds) -> None:
    """All on the stream before any is waited for: a copy beside decode steps of its source."""
    wanted = cold(driver, colds)
    driver.watched = False
    submitted = [driver.submit(driver.first_chunk(7, PROMPT, setup_of(PROMPT)))]
    submitted.append(driver.submit(driver.decode(7), num_steps=4))
    for slot in (0, 1, 2):
        row = driver.first_chunk(slot, PROMPT[400:], setup_of(PROMPT), source=7, num_cached=400)
        submitted.append(driver.submit(driver.decode(7), row))
    last = [driver.decode(slot) for slot in (2, 7, 0, 1)]
    submitted.append(driver.submit(*last, num_steps=NUM_NEW))
    results = [driver.executor.collect(one) for one in submitted]
    for slot in (7, 0, 1, 2):
        rows = [by_slot(result)[slot] for result in results if slot in by_slot(result)]
        assert [token for row in rows for token in row.token_ids] == wanted.tokens, slot


ADJUSTMENTS: dict[str, dict[str, Any]] = {
    "penalties": {
        "frequency_penalty": 0.8,
        "presence_penalty": -0.4,
        "generated_token_ids": 3 * tuple(range(0, VOCAB_SIZE, 2)),
    },
    "repetition": {
        "repetition_penalty": 3.0,
        "prompt_token_ids": tuple(range(0, VOCAB_SIZE, 2)),
        "generated_token_ids": (5, 5, 9),
    },
    "biases": {"biases": ((7, 12.0), (VOCAB_SIZE - 1, 11.5), (11, -100.0))},
    "min_len": {"min_len": len(PROMPT) + 5, "biases": ((3, 30.0),)},
    "all": {
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "prompt_token_ids": tuple(sorted(set(PROMPT))),
        "generated_token_ids": (8, 9, 8),
        "biases": tuple((token_id, token_id / 500) for token_id in range(0, VOCAB_SIZE, 3)),
        "min_len": len(PROMPT) + NUM_NEW,
    },
}


def drawn_by_the_cpu(
    setup: SlotSetup, logits: dict[int, torch.Tensor], masks: list[bytes] | None = None
) -> list[int]:
    """From logits by position."""
    sampler = Sampler(_native.CpuOps(1), 1, 1, VOCAB_SIZE)
    sampler.set_slot(0, setup)
    tokens = []
    for index, position in enumerate(sorted(logits)):
        chosen = {} if masks is None else {0: masks[index]}
        tokens += sampler.sample(logits[position][None], [0], [position], chosen)
    return tokens


@pytest.mark.parametrize("draw", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 3}])
@pytest.mark.parametrize("kind", ADJUSTMENTS)
def test_adjusted_as_on_the_cpu(
    driver: GpuDriver, colds: Colds, kind: str, draw: dict[str, Any]
) -> None:
    parameters = {**draw, "end": (3,), "adjustment": LogitAdjustment(**ADJUSTMENTS[kind])}
    tokens = driver.generate(PROMPT, NUM_NEW, 6, **parameters)
    setup = sampling(len(PROMPT) + NUM_NEW, **parameters)
    assert tokens == drawn_by_the_cpu(setup, driver.logits_of(6))
    assert tokens != driver.generate(PROMPT, NUM_NEW, 6, **{**parameters, "adjustment": None})
    driver.watched = False
    assert driver.generate(PROMPT, NUM_NEW, 9, num_steps=5, **parameters) == tokens
    assert driver.generate(PROMPT, NUM_NEW, 9, cuts=(7, len(PROMPT) // 2), **parameters) == tokens


def mask_of(seed: int, count: int) -> bytes:
    """`count` tokens or fewer."""
    bits = 0
    for token_id in prompt_of(seed, count):
        bits |= 1 << token_id
    return bits.to_bytes(VOCAB_SIZE // 8, "little")


@pytest.mark.parametrize("num_steps", [1, 3])
def test_constrained_rows_among_free_ones(driver: GpuDriver, colds: Colds, num_steps: int) -> None:
    """The free ones have the bits that they have alone, and the others what their masks leave."""
    wanted = cold(driver, colds)
    adjustment = LogitAdjustment(**ADJUSTMENTS["all"])
    setups = {
        4: setup_of(PROMPT, masked=True),
        5: setup_of(PROMPT),
        2: setup_of(PROMPT, masked=True, adjustment=adjustment, temperature=0.0),
        11: setup_of(PROMPT, num_logprobs=3),
    }
    # A token a command for the constrained ones.
    masks = [mask_of(seed, 40) for seed in range(NUM_NEW)]
    tokens: dict[int, list[int]] = {slot: [] for slot in setups}
    for slot, setup in setups.items():
        allowed = masks[0] if setup.masked else b""
        result = driver.run(driver.first_chunk(slot, PROMPT, setup, allowed_tokens=allowed))
        tokens[slot] += result.rows[0].token_ids
    for index in range(1, NUM_NEW):
        rows = [
            driver.decode(slot, masks[index] if setup.masked else b"")
            for slot, setup in setups.items()
        ]
        for row in driver.run(*rows, num_steps=num_steps).rows:
            assert not row.corrupted
            assert len(row.token_ids) == 1 or not setups[row.slot].masked
            tokens[row.slot] += row.token_ids
    for slot in (5, 11):
        assert_cold(driver, slot, tokens[slot], wanted)
    for slot in (4, 2):
        assert tokens[slot] == drawn_by_the_cpu(setups[slot], driver.logits_of(slot), masks)
        for token_id, mask in zip(tokens[slot], masks, strict=True):
            assert mask[token_id // 8] >> token_id % 8 & 1
    told = [one for (slot, _), found in driver.logprobs.items() if slot == 11 for one in found]
    assert len(told[-NUM_NEW:]) == NUM_NEW


def test_no_token_is_left(driver: GpuDriver, colds: Colds) -> None:
    """A mask without a token ends its own row alone."""
    wanted = cold(driver, colds)
    setup = setup_of(PROMPT, masked=True)
    tokens = list(driver.run(driver.first_chunk(1, PROMPT, setup_of(PROMPT))).rows[0].token_ids)
    driver.run(driver.first_chunk(2, PROMPT, setup, allowed_tokens=mask_of(1, 9)))
    nothing = driver.decode(2, bytes(VOCAB_SIZE // 8))
    free, bad = driver.run(driver.decode(1), nothing, num_steps=3).rows
    assert (bad.corrupted, bad.token_ids, len(free.token_ids)) == (True, (), 3)
    assert_cold(driver, 1, finish(driver, 1, [*tokens, *free.token_ids]), wanted)


def prompt_logprobs(
    driver: GpuDriver, slot: int, count: int, cuts: tuple[int, ...] = (), *beside: Row
) -> list[TokenLogprobs]:
    """Of PROMPT, in chunks that end at the cuts."""
    found: list[TokenLogprobs] = []
    setup = setup_of(PROMPT, num_prompt_logprobs=count)
    begin = 0
    for end in (*cuts, len(PROMPT)):
        last = end == len(PROMPT)
        others: dict[str, Any] = {"sample": last}
        if not last:
            others["next_token_id"] = PROMPT[end]
        piece = PROMPT[begin:end]
        row = (
            driver.chunk(slot, begin, piece, **others)
            if begin
            else driver.first_chunk(slot, piece, setup, **others)
        )
        found += by_slot(driver.run(*beside, row))[slot].prompt_logprobs
        begin = end
    return found


@pytest.mark.parametrize("count", [0, 5, 20])
def test_logprobs_of_a_prompt(driver: GpuDriver, colds: Colds, count: int) -> None:
    """As the logits behind every part of it say; the same bits in any chunks and company."""
    got = prompt_logprobs(driver, 6, count)
    assert len(got) == len(PROMPT) - 1
    tokens = finish(driver, 6, list(cold(driver, colds).tokens[:1]))
    assert tokens == cold(driver, colds).tokens
    allowed = tolerance("logprobs")
    for length in (1, 2, 16, 17, 128, 300, len(PROMPT) - 1):
        driver.run(driver.first_chunk(0, PROMPT[:length], setup_of(PROMPT)))
        row = driver.logits_of(0)[length]
        logprob, rank, ids, logprobs = reference.logprobs(row, PROMPT[length], count)
        one = got[length - 1]
        assert (one.rank, list(one.best_token_ids)) == (rank, ids)
        assert [one.logprob, *one.best_logprobs] == pytest.approx(
            [logprob, *logprobs], rel=allowed.relative, abs=allowed.absolute
        )
    assert prompt_logprobs(driver, 3, count, (1, 2, 130, 131, 400)) == got
    noise = driver.first_chunk(4, prompt_of(3, 100), sampling(MAX_LEN, num_logprobs=2))
    driver.run(noise)
    assert prompt_logprobs(driver, 9, count, (17, 250), driver.decode(4)) == got


def test_a_sequence_of_one_token(driver: GpuDriver) -> None:
    """No token of the prompt follows another."""
    setup = sampling(9, num_prompt_logprobs=3)
    row = driver.run(driver.first_chunk(2, (5,), setup)).rows[0]
    assert (len(row.token_ids), row.prompt_logprobs) == (1, ())
