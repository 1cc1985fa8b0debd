"""Logprobs of a prompt's own tokens: right, and the same however the prompt is computed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import tolerance
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker_driver import Driver, by_slot, free_address, on_ranks, same_bits, sampling

import reference
from checkpoints import VOCAB_SIZE, make_checkpoint
from worker.batch import BatchBuffers, ChunkSpan, PrefillChunk, TokenLogprobs

LENGTH = 37
PROMPT = tuple(random.Random(4).choices(range(3, VOCAB_SIZE), k=LENGTH))
# Low: another row would give another token.
SEEDED: dict[str, Any] = {"temperature": 0.2, "seed": 5}
ALL_CUTS = [(), (1,), (36,), (16,), (5, 11, 12, 30), tuple(range(1, LENGTH))]


@pytest.fixture(scope="module", params=["llama", "qwen3-bfloat16", "one-layer"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "one-layer":
        return make_checkpoint(directory, "llama", seed=5, num_hidden_layers=1)
    family, _, dtype = request.param.partition("-")
    return make_checkpoint(directory, family, seed=5, dtype=dtype or "float32")


@pytest.fixture(scope="module")
def every_row(folder: Path) -> Tensor:
    """Logits [LENGTH, V], from one forward that samples from all of its rows."""
    return every_row_of(Driver(folder, num_slots=LENGTH, max_seq_len=64))


def every_row_of(driver: Driver) -> Tensor:
    batch = BatchBuffers(LENGTH).fill([], [PrefillChunk(1, 1, 0, PROMPT, False, None)])
    every = tuple(ChunkSpan(row, row + 1, 1, row) for row in range(LENGTH))
    wanted = replace(batch, sample_rows=torch.arange(LENGTH), sampled_chunks=every)
    return driver.decoder.forward(wanted).clone()


def told(
    driver: Driver, slot: int, cuts: tuple[int, ...], count: int, beside: Any = None
) -> tuple[list[TokenLogprobs], list[int]]:
    """Of PROMPT in chunks, and the tokens drawn after it; `beside` gives neighbours' rows."""
    setup = sampling(LENGTH + 5, num_prompt_logprobs=count, **SEEDED)
    found: list[TokenLogprobs] = []
    tokens: list[int] = []
    for begin, end in itertools.pairwise([0, *cuts, LENGTH]):
        piece, sample = PROMPT[begin:end], end == LENGTH
        after = {} if sample else {"next_token_id": PROMPT[end]}
        if begin:
            row = driver.chunk(slot, begin, piece, sample=sample, **after)
        else:
            row = driver.first_chunk(slot, piece, setup, sample=sample, **after)
        before, behind = beside() if beside else ([], [])
        got = by_slot(driver.run(*before, row, *behind))[slot]
        assert len(got.prompt_logprobs) == len(piece) - sample
        found += got.prompt_logprobs
        tokens += got.token_ids
    row_result = driver.run(driver.decode(slot), num_steps=4).rows[0]
    assert row_result.prompt_logprobs == ()
    return found, tokens + list(row_result.token_ids)


def assert_right(found: list[TokenLogprobs], rows: Tensor, count: int) -> None:
    allowed = tolerance("logprobs")
    assert len(found) == LENGTH - 1
    for got, logits, token_id in zip(found, rows, PROMPT[1:], strict=False):
        logprob, rank, ids, logprobs = reference.logprobs(logits, token_id, count)
        assert (got.rank, list(got.best_token_ids)) == (rank, ids)
        assert [got.logprob, *got.best_logprobs] == pytest.approx(
            [logprob, *logprobs], rel=allowed.relative, abs=allowed.absolute
        )


@pytest.mark.parametrize("count", [0, 3, 20])
def test_equal_the_oracle(folder: Path, every_row: Tensor, count: int) -> None:
    driver = Driver(folder, max_seq_len=64)
    found, tokens = told(driver, 2, (), count)
    assert_right(found, every_row, count)
    assert tokens == Driver(folder, max_seq_len=64).generate(PROMPT, 5, **SEEDED)


@pytest.mark.parametrize("cuts", ALL_CUTS)
@pytest.mark.parametrize("max_running", [1, 3, 8])
def test_every_chunking(folder: Path, cuts: tuple[int, ...], max_running: int) -> None:
    """The same bits; rows go through the head in blocks of as many as may run."""
    whole = told(Driver(folder, num_slots=40, max_seq_len=64), 0, (), 7)
    driver = Driver(folder, num_slots=8, max_running=max_running, max_seq_len=64)
    assert told(driver, 6, cuts, 7) == whole


@pytest.mark.parametrize("cuts", ALL_CUTS)
def test_every_company(folder: Path, cuts: tuple[int, ...]) -> None:
    """Beside rows that decode, prompts that end, prompts that do not, and others' logprobs."""
    expected = told(Driver(folder, max_seq_len=64), 0, (), 7)
    driver = Driver(folder, num_slots=6, max_seq_len=64)
    running = sampling(64, num_logprobs=2, **SEEDED)
    driver.run(driver.first_chunk(0, PROMPT[:9], running))

    def beside() -> tuple[list[Any], list[Any]]:
        wants = sampling(64, num_prompt_logprobs=1)
        rows = [
            driver.first_chunk(5, PROMPT[:4], wants, sample=False, next_token_id=1),
            driver.first_chunk(1, PROMPT[3:20], wants),
            driver.first_chunk(4, PROMPT[:2], sampling(64), sample=False),
        ]
        return [driver.decode(0), *rows[:1]], rows[1:]

    assert told(driver, 3, cuts, 7, beside) == expected


def test_neighbours_get_their_own(folder: Path) -> None:
    """Two prompts in one command, each in blocks, with different counts."""
    driver = Driver(folder, num_slots=4, max_running=3, max_seq_len=64)
    other = PROMPT[::-1]
    alone = {}
    for prompt, count in ((PROMPT, 2), (other, 5)):
        row = driver.first_chunk(1, prompt, sampling(60, num_prompt_logprobs=count))
        alone[count] = driver.run(row).rows[0].prompt_logprobs
    result = driver.run(
        driver.first_chunk(0, other, sampling(60, num_prompt_logprobs=5)),
        driver.first_chunk(2, PROMPT, sampling(60, num_prompt_logprobs=2)),
    )
    assert [row.prompt_logprobs for row in result.rows] == [alone[5], alone[2]]
    assert alone[5] != alone[2]


def test_the_next_tenant_wants_none(folder: Path) -> None:
    driver = Driver(folder, max_seq_len=64)
    told(driver, 1, (), 0)
    assert driver.run(driver.first_chunk(1, PROMPT, sampling(60))).rows[0].prompt_logprobs == ()


def test_more_than_the_vocabulary_has(tmp_path: Path) -> None:
    driver = Driver(make_checkpoint(tmp_path, "qwen3", vocab_size=11), max_seq_len=64)
    setup = sampling(9, num_prompt_logprobs=20)
    found = driver.run(driver.first_chunk(0, (1, 2, 10), setup)).rows[0].prompt_logprobs
    assert [sorted(token.best_token_ids) for token in found] == [list(range(11))] * 2


def test_head_logits_are_those_of_a_forward(folder: Path, every_row: Tensor) -> None:
    """Any rows of the last forward, in any blocks, again and again."""
    driver = Driver(folder, max_seq_len=64, max_step_tokens=64)
    chunk = PrefillChunk(1, 1, 0, PROMPT, False, None)
    decoder = driver.decoder
    batch = BatchBuffers(64).chunk_batch((chunk,))
    assert decoder.forward(batch).shape[0] == 0
    for begin, end in ((0, 4), (33, 37), (5, 6), (1, 4), (0, 4)):
        rows = torch.arange(begin, end)
        spans = (ChunkSpan(0, end - begin, 1, begin),)
        assert same_bits(decoder.head_logits(batch, rows, spans), every_row[begin:end])
    spans = (ChunkSpan(0, 1, 1, 20), ChunkSpan(1, 3, 1, 7))
    wanted = every_row[[20, 7, 8]]
    assert same_bits(decoder.head_logits(batch, torch.tensor([20, 7, 8]), spans), wanted)


def test_equal_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", seed=5)
    found, _ = told(Driver(folder, max_seq_len=64), 0, (9,), 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = theirs[torch.arange(LENGTH - 1), list(PROMPT[1:])].tolist()
    allowed = tolerance("logits_float32")
    assert [token.logprob for token in found] == pytest.approx(
        expected, rel=allowed.relative, abs=allowed.absolute
    )


def test_on_two_ranks(tmp_path: Path) -> None:
    """Blocks are collectives: ranks run the same ones, and tell the same."""
    folder = make_checkpoint(tmp_path, "qwen3", seed=5, vocab_size=321)
    address = free_address()

    def work(rank: int) -> list[Any]:
        ranks = {"rank": rank, "world_size": 2, "rendezvous_address": address}
        driver = Driver(folder, num_slots=LENGTH, max_seq_len=64, **ranks)
        found = [told(driver, slot, cuts, 7) for slot, cuts in enumerate(ALL_CUTS)]
        assert_right(found[0][0], every_row_of(driver), 7)
        return found

    left, right = on_ranks(2, work)
    assert left == right
    assert all(found == left[0] for found in left)
