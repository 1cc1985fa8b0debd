"""Prefixes of other slots and of the own: any that is reused gives the bits of a cold run."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_driver import Driver, by_slot, free_address, on_ranks, same_bits, sampling

from checkpoints import VOCAB_SIZE, make_checkpoint
from worker.batch import PrefillChunk, Row, StepResult
from worker.errors import ProtocolError

# Around tiles of 32 positions and a split of 256.
BORDERS = (1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 299, 300)
MAX_LEN = 384
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "seed": 11}
NUM_NEW = 4


@pytest.fixture(scope="module", params=["llama", "qwen3-bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _, dtype = request.param.partition("-")
    directory = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(directory, family, seed=8, dtype=dtype or "float32")


def open_driver(folder: Path, **setup: Any) -> Driver:
    values = {"num_slots": 6, "max_running": 3, "max_seq_len": MAX_LEN, **setup}
    return Driver(folder, max_step_tokens=320, **values)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Driver:
    """Runs each request in a slot that takes nothing over."""
    return open_driver(folder, num_slots=1, max_running=1)


@pytest.fixture
def driver(folder: Path) -> Driver:
    return open_driver(folder)


def tokens_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, VOCAB_SIZE), k=length))


PROMPT = tokens_of(1, 300)


def warm_row(
    driver: Driver, slot: int, source: int, length: int, prompt: tuple[int, ...], **others: Any
) -> PrefillChunk:
    """The whole of `prompt` behind `length` positions of `source`; asks for NUM_NEW tokens."""
    setup = sampling(len(prompt) + NUM_NEW, **SEEDED)
    return driver.first_chunk(
        slot, prompt[length:], setup, source=source, num_cached=length, **others
    )


def finish(driver: Driver, slot: int, first: StepResult) -> list[int]:
    tokens = list(by_slot(first)[slot].token_ids)
    return tokens + list(driver.run(driver.decode(slot), num_steps=NUM_NEW).rows[0].token_ids)


def assert_cold(driver: Driver, slot: int, tokens: list[int], cold: Driver, prompt: Any) -> None:
    """The slot's request, its logits and its K and V are those of a cold run."""
    assert tokens == cold.generate(prompt, NUM_NEW, **SEEDED)
    expected = cold.logits_of(0)
    got = driver.logits_of(slot)
    assert got.keys() == expected.keys()
    for position, row in expected.items():
        assert same_bits(got[position], row), f"logits differ at position {position}"
    end = len(prompt) + NUM_NEW - 1
    caches = [(d.decoder.cache.keys, d.decoder.cache.values) for d in (driver, cold)]
    for ours, theirs in zip(*(itertools.chain(*pair) for pair in caches), strict=True):
        assert torch.equal(ours[slot, :end].float(), theirs[0, :end].float())


@pytest.mark.parametrize("length", BORDERS)
@pytest.mark.parametrize("own", [False, True])
def test_every_length_of_a_prompt(driver: Driver, cold: Driver, length: int, own: bool) -> None:
    """Copied, and left where it is; behind it another text, or the end of the same."""
    driver.run(driver.first_chunk(0, PROMPT, sampling(MAX_LEN)))
    tail = tokens_of(length, 1 + length % 7)
    prompt = PROMPT[:length] + tail
    slot = 0 if own else 4
    first = driver.run(warm_row(driver, slot, 0, length, prompt))
    assert_cold(driver, slot, finish(driver, slot, first), cold, prompt)


@pytest.mark.parametrize("own", [False, True])
def test_every_generated_position(driver: Driver, cold: Driver, own: bool) -> None:
    """All that is computed may be reused, which is all but the last token; not one more."""
    prompt, num_new = tokens_of(5, 27), 12
    for length in range(len(prompt) - 1, len(prompt) + num_new):
        said = driver.generate(prompt, num_new, 2, num_steps=5, **SEEDED)
        again = (*prompt, *said)[:length] + tokens_of(length, 3)
        slot = 2 if own else 5
        first = driver.run(warm_row(driver, slot, 2, length, again))
        assert_cold(driver, slot, finish(driver, slot, first), cold, again)
    driver.generate(prompt, num_new, 2, num_steps=5, **SEEDED)
    length = len(prompt) + num_new
    with pytest.raises(ProtocolError, match=rf"must be in \[1, {length - 1}\]"):
        driver.run(warm_row(driver, 3, 2, length, (*prompt, *said, 7)))


@pytest.mark.parametrize("own", [False, True])
def test_after_a_cancel_in_mid_prefill(driver: Driver, cold: Driver, own: bool) -> None:
    """B13: two chunks of three, and the same prompt anew; the scheduler knows what is written."""
    driver.run(driver.first_chunk(1, PROMPT[:100], sampling(MAX_LEN), sample=False))
    driver.run(driver.chunk(1, 100, PROMPT[100:150], sample=False))
    slot = 1 if own else 0
    first = driver.run(warm_row(driver, slot, 1, 150, PROMPT))
    assert_cold(driver, slot, finish(driver, slot, first), cold, PROMPT)


def test_from_a_busy_slot(driver: Driver, cold: Driver) -> None:
    """B27: its owner decodes in the same command, and goes on undisturbed."""
    busy = tokens_of(2, 40)
    said = list(driver.run(driver.first_chunk(0, busy, sampling(44, **SEEDED))).rows[0].token_ids)
    said += driver.run(driver.decode(0)).rows[0].token_ids
    prompt = (*busy, said[0], 9, 8, 7)
    result = driver.run(driver.decode(0), warm_row(driver, 1, 0, 41, prompt))
    said += result.rows[0].token_ids
    assert_cold(driver, 1, finish(driver, 1, result), cold, prompt)
    said += driver.run(driver.decode(0)).rows[0].token_ids
    assert_cold(driver, 0, said, cold, busy)


def test_in_several_chunks(driver: Driver, cold: Driver) -> None:
    driver.run(driver.first_chunk(0, PROMPT, sampling(MAX_LEN)))
    setup = sampling(300 + NUM_NEW, **SEEDED)
    driver.run(driver.first_chunk(1, PROMPT[65:66], setup, sample=False, source=0, num_cached=65))
    driver.run(driver.chunk(1, 66, PROMPT[66:200], sample=False))
    first = driver.run(driver.chunk(1, 200, PROMPT[200:]))
    assert_cold(driver, 1, finish(driver, 1, first), cold, PROMPT)


def test_copies_of_one_command_go_by_its_rows(driver: Driver, cold: Driver) -> None:
    """Each slot is copied from before a later row takes it, and keeps or receives another's."""
    texts = [tokens_of(20 + slot, 50) for slot in range(4)]
    for slot, text in enumerate(texts):
        driver.run(driver.first_chunk(slot, text, sampling(MAX_LEN), sample=False))
    # (slot, source): 4 from 0, then 0 from 1, then 1 its own.
    plan = [(4, 0, 40), (0, 1, 33), (1, 1, 20)]
    prompts = {slot: texts[source][:length] + (5, slot) for slot, source, length in plan}
    rows: list[Row] = [warm_row(driver, slot, s, n, prompts[slot]) for slot, s, n in plan]
    # Slots 4, 0 and 1 have decode rows of their own: 1, 0 and 1 would not do.
    rows[0] = on_decode_row(rows[0], 2)
    result = driver.run(*rows)
    for slot in (4, 0, 1):
        first = StepResult(0, 0, 0, (by_slot(result)[slot],), 0)
        assert_cold(driver, slot, finish(driver, slot, first), cold, prompts[slot])


def on_decode_row(row: Row, decode_row: int) -> PrefillChunk:
    assert isinstance(row, PrefillChunk)
    assert row.setup is not None
    return replace(row, setup=replace(row.setup, decode_row=decode_row))


def test_one_source_for_many(driver: Driver, cold: Driver) -> None:
    """As for the answers to one prompt: in one command, beside the source's own new tenant."""
    driver.run(driver.first_chunk(5, PROMPT[:90], sampling(MAX_LEN), sample=False))
    prompts = {slot: PROMPT[:80] + (slot, 6) for slot in (0, 1, 5)}
    result = driver.run(*(warm_row(driver, s, 5, 80, prompts[s]) for s in (0, 1, 5)))
    for slot, prompt in prompts.items():
        first = StepResult(0, 0, 0, (by_slot(result)[slot],), 0)
        assert_cold(driver, slot, finish(driver, slot, first), cold, prompt)


def test_what_a_corrupted_tenant_had_before(driver: Driver, cold: Driver) -> None:
    """It ends where its logits held a NaN; what was computed before is as good as ever."""
    driver.run(driver.first_chunk(0, PROMPT, sampling(MAX_LEN)))
    forward = driver.decoder.forward
    driver.decoder.forward = lambda batch: forward(batch).fill_(float("nan"))  # type: ignore
    assert driver.run(driver.decode(0)).rows[0].corrupted
    driver.decoder.forward = forward  # type: ignore[method-assign]
    prompt = PROMPT[:280] + (4, 4)
    for slot in (1, 0):
        first = driver.run(warm_row(driver, slot, 0, 280, prompt))
        assert_cold(driver, slot, finish(driver, slot, first), cold, prompt)


@dataclass
class Request:
    prompt: tuple[int, ...]
    num_new: int
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.num_new


class Players:
    """A scheduler with no plan: random requests, slots, sources, cuts and commands."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver, self.rng = driver, random.Random(seed)
        self.num_slots = driver.info.limits.num_slots
        self.running: dict[int, Request] = {}
        self.rows: dict[int, int] = {}
        # Tokens whose K and V are written.
        self.written: list[tuple[int, ...]] = [()] * self.num_slots
        self.finished: list[Request] = []
        self.digests: list[int] = []
        self.num_reused = 0

    def play(self, num_commands: int) -> None:
        for _ in range(num_commands):
            self._cancel_some()
            rows = self._rows()
            num_steps = 1
            if rows and not any(isinstance(row, PrefillChunk) for row in rows):
                num_steps = self.rng.randrange(1, 4)
            if rows:
                self._apply(rows, self.driver.run(*rows, num_steps=num_steps))

    def _cancel_some(self) -> None:
        for slot in [slot for slot in self.running if self.rng.random() < 0.03]:
            del self.running[slot], self.rows[slot]

    def _rows(self) -> list[Row]:
        rng = self.rng
        decoding = [s for s, r in self.running.items() if r.tokens and rng.random() < 0.8]
        rows: list[Row] = [self.driver.decode(slot) for slot in decoding]
        for slot, request in self.running.items():
            if request.num_computed < len(request.prompt) and rng.random() < 0.8:
                rows.append(self._chunk(slot, request, None))
        taken: set[int] = set()
        while len(self.running) < self.driver.info.limits.max_running and rng.random() < 0.6:
            slot = rng.choice([s for s in range(self.num_slots) if s not in self.running])
            request = self._request()
            sources = [s for s in range(self.num_slots) if s not in taken]
            best = max(sources, key=lambda s: common(self.written[s], request.prompt))
            length = min(common(self.written[best], request.prompt), len(request.prompt) - 1)
            length = rng.choice((length, rng.randrange(length + 1)))
            self.num_reused += length
            request.num_computed = length
            free = set(range(self.driver.info.limits.max_running)) - set(self.rows.values())
            self.rows[slot] = rng.choice(sorted(free))
            self.running[slot] = request
            taken.add(slot)
            rows.append(self._chunk(slot, request, (best, length)))
        return rows

    def _request(self) -> Request:
        """Few beginnings and few tokens: many have much in common with what is written."""
        rng = self.rng
        known = rng.choice([tokens_of(rng.randrange(3), 70), *self.written, ()])
        start = known[: rng.choice((90, rng.randrange(len(known) + 1)))][:90]
        prompt = (*start, *(rng.randrange(3, 9) for _ in range(rng.randrange(1, 6))))
        return Request(prompt, rng.randrange(1, 7))

    def _chunk(self, slot: int, request: Request, prefix: tuple[int, int] | None) -> PrefillChunk:
        start, left = request.num_computed, len(request.prompt) - request.num_computed
        count = self.rng.choice((left, self.rng.randrange(1, left + 1)))
        piece, last = request.prompt[start : start + count], count == left
        if prefix is None:
            return self.driver.chunk(slot, start, piece, sample=last)
        setup = sampling(len(request.prompt) + request.num_new, **SEEDED)
        row = self.driver.first_chunk(
            slot, piece, setup, sample=last, source=prefix[0], num_cached=prefix[1]
        )
        return on_decode_row(row, self.rows[slot])

    def _apply(self, rows: list[Row], result: StepResult) -> None:
        self.digests.append(result.digest)
        for row, got in zip(rows, result.rows, strict=True):
            request = self.running[row.slot]
            if isinstance(row, PrefillChunk):
                request.num_computed = row.start + len(row.token_ids)
                self.written[row.slot] = request.prompt[: request.num_computed]
            request.tokens += got.token_ids
            if request.tokens:
                self.written[row.slot] = (*request.prompt, *request.tokens[:-1])
            if request.done:
                self.finished.append(request)
                del self.running[row.slot], self.rows[row.slot]


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving(folder: Path, cold: Driver, seed: int) -> None:
    """More slots than decode rows; rows change hands, sources are busy, cancelled, overwritten."""
    players = Players(open_driver(folder, num_slots=5, max_running=3), seed)
    players.play(160)
    assert len(players.finished) > 25
    assert players.num_reused > 400
    for request in players.finished:
        assert request.tokens == cold.generate(request.prompt, request.num_new, **SEEDED)


def test_any_interleaving_on_two_ranks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", seed=8)
    cold, address = open_driver(folder, num_slots=1, max_running=1), free_address()

    def work(rank: int) -> Players:
        ranks = {"rank": rank, "world_size": 2, "rendezvous_address": address}
        players = Players(open_driver(folder, num_slots=5, **ranks), 7)
        players.play(80)
        return players

    left, right = on_ranks(2, work)
    assert left.digests == right.digests
    assert left.num_reused > 300
    for ours, theirs in zip(left.finished, right.finished, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.tokens == cold.generate(ours.prompt, ours.num_new, **SEEDED)


def test_a_decode_row_changes_hands(driver: Driver, cold: Driver) -> None:
    """The old tenant may be read from, but runs no more."""
    text = tokens_of(3, 30)
    driver.run(driver.first_chunk(0, text, sampling(MAX_LEN)))
    first = driver.run(warm_row(driver, 3, 0, 30, (*text, 8)))
    assert_cold(driver, 3, finish(driver, 3, first), cold, (*text, 8))
    with pytest.raises(ProtocolError, match="slot 0: its decode row 0 is now slot 3's"):
        driver.run(driver.decode(0))
