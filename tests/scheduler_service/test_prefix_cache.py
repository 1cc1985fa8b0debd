"""What the scheduler makes of the prefix cache. The fake worker gives wrong tokens for a wrong
prefix, and refuses one that is not written."""

from __future__ import annotations

import itertools
import random

import pytest
from scheduler_driver import Driver, make_limits, make_request

from fakes import CORRUPTED
from scheduler_service.prefix_index import PrefixReuse
from scheduler_service.request import FinishReason, choice_id
from scheduler_service.step import PrefillChunk

SYSTEM = tuple(range(500, 600))


def driver(script=None, **changes) -> Driver:
    limits = {"num_slots": 4, "max_seq_len": 2000, "max_step_tokens": 64}
    limits["max_mixed_step_tokens"] = changes.get("max_step_tokens", 64)
    return Driver(make_limits(**limits | changes), script)


def run(d: Driver, name: str, prompt: tuple[int, ...], max_new_tokens: int = 5, **fields) -> int:
    """Runs a request alone; returns its cached tokens."""
    d.submit(make_request(name, prompt, max_new_tokens, **fields))
    d.run()
    return check(d, name)


def check(d: Driver, name: str) -> int:
    told = d.told[name]
    assert told.tokens == d.alone(name)
    assert told.end.num_cached_tokens == told.request.num_cached_tokens
    return told.end.num_cached_tokens


def counters(d: Driver):
    return d.scheduler.counters.prefix_cache


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1000) for _ in range(length))


def test_a_repeated_prompt_is_computed_but_for_its_last_token():
    d = driver()
    prompt = prompt_of(1, 150)
    assert run(d, "a", prompt) == 0
    before = d.worker.num_prefill_tokens
    assert run(d, "b", prompt, seed=5) == 149
    assert d.worker.num_prefill_tokens - before == 1
    assert d.worker.num_copied_tokens == 0, "its slot is taken as it is"
    c = counters(d)
    assert (c.num_queried_tokens, c.num_hit_tokens, c.num_hits, c.num_copies) == (300, 149, 1, 0)
    # The first answer and the last token of the prompt.
    assert (c.num_evictions, c.num_evicted_tokens) == (1, 5)


def test_sixteen_turns_compute_only_what_is_new():
    d = driver()
    prompt = prompt_of(2, 80)
    for turn in range(16):
        name = f"turn{turn}"
        before = d.worker.num_prefill_tokens
        cached = run(d, name, prompt, 9, seed=turn)
        # The last token of an answer was never read.
        assert cached == (len(prompt) - 31 if turn else 0)
        assert d.worker.num_prefill_tokens - before == len(prompt) - cached
        prompt += tuple(d.told[name].tokens) + prompt_of(100 + turn, 30)


def test_history_ends_before_the_last_token():
    d = driver()
    run(d, "a", prompt_of(3, 40), 6)
    view = d.scheduler.slot_views()[0]
    assert (view.state, view.num_cached_tokens) == ("free", 45)
    assert d.scheduler.num_cached_tokens == 45
    assert run(d, "b", prompt_of(3, 40) + tuple(d.told["a"].tokens) + (1, 2)) == 45


def test_a_prefix_of_a_busy_slot_is_copied():
    d = driver()
    d.submit(make_request("a", prompt_of(4, 100), 50))
    while len(d.told["a"].tokens) < 20:
        d.step()
    known = prompt_of(4, 100) + tuple(d.told["a"].tokens[:10])
    d.submit(make_request("b", (*known, 7, 7), 5, seed=3))
    d.run()
    assert check(d, "b") == 110
    check(d, "a")
    c = counters(d)
    assert (c.num_copies, c.num_copied_tokens, c.num_evictions) == (1, 110, 0)
    assert d.worker.num_copied_tokens == 110


@pytest.mark.parametrize(("shared", "cached"), [(15, 0), (16, 16)])
def test_few_tokens_are_not_worth_a_copy(shared, cached):
    d = driver()
    run(d, "a", prompt_of(5, shared) + (1,) * 90)
    assert run(d, "b", prompt_of(5, shared) + (2,) * 90) == cached


def test_what_a_slot_has_need_not_be_worth_a_copy():
    d = driver(num_slots=1)
    run(d, "a", prompt_of(5, 3) + (1,) * 30)
    assert run(d, "b", prompt_of(5, 3) + (2,) * 30) == 3


@pytest.mark.parametrize("max_outstanding", [1, 2, 3])
@pytest.mark.parametrize("num_answers", [2, 4])
def test_several_answers_compute_the_prompt_once(num_answers, max_outstanding):
    d = driver(max_outstanding=max_outstanding)
    prompt = prompt_of(6, 300)
    names = [choice_id("a", index) for index in range(num_answers)]
    d.submit(*(make_request(name, prompt, 8, seed=i) for i, name in enumerate(names)))
    d.run()
    assert [check(d, name) for name in names] == [0] + [299] * (num_answers - 1)
    assert d.worker.num_prefill_tokens == 300 + num_answers - 1


def test_b27_equal_prompts_at_once_then_others():
    d = driver(num_slots=4)
    prompt = prompt_of(7, 230)
    for name in "abc":
        d.submit(make_request(name, prompt, 300, seed=ord(name)))
    for _ in range(10):
        d.step()
    for index in range(12):
        d.submit(make_request(f"other{index}", prompt_of(50 + index, 90), 5))
    d.run()
    assert [check(d, name) for name in "abc"] == [0, 229, 229]
    for index in range(12):
        check(d, f"other{index}")


def test_a_shared_system_prompt_is_computed_once_in_a_burst():
    d = driver(num_slots=8, max_step_tokens=128)
    for index in range(8):
        d.submit(make_request(f"r{index}", SYSTEM + prompt_of(index, 20), 4, seed=index))
    d.run()
    assert [check(d, f"r{index}") for index in range(8)] == [0] + [100] * 7
    assert d.worker.num_prefill_tokens == 100 + 8 * 20


@pytest.mark.parametrize("cancel_first", [True, False])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_b13_cancelled_in_prefill(chunks, cancel_first):
    """What was sent is written; the next one, or one that waited, goes on from there."""
    d = driver(max_step_tokens=64, max_outstanding=1)
    prompt = prompt_of(8, 400)
    for attempt in range(20):
        d.submit(make_request(f"a{attempt}", prompt, 4))
        if not cancel_first:
            d.submit(make_request(f"b{attempt}", prompt, 4))
        for _ in range(chunks):
            d.step()
        d.plan()
        if f"a{attempt}" in d.scheduler.requests:
            d.cancel(f"a{attempt}")
        if cancel_first:
            d.submit(make_request(f"b{attempt}", prompt, 4))
        d.scheduler.check_integrity()
        d.run()
        cached = check(d, f"b{attempt}")
        assert cached == (64 * (chunks + 1) if attempt == 0 else 399)


def test_b28_another_salt_shares_nothing():
    d = driver()
    prompt = prompt_of(9, 100)
    assert run(d, "a", prompt, cache_salt="x") == 0
    assert run(d, "b", prompt, cache_salt="y") == 0
    assert run(d, "c", prompt) == 0
    assert run(d, "d", prompt, cache_salt="x") == 99
    for name, salt in (("e", "p"), ("f", "q"), ("g", "p")):
        d.submit(make_request(name, prompt_of(10, 100), 4, cache_salt=salt))
    d.run()
    assert [check(d, name) for name in "efg"] == [0, 0, 99]


def test_b28_prompt_logprobs_read_nothing_and_leave_all():
    d = driver()
    prompt = prompt_of(11, 100)
    run(d, "a", prompt)
    assert run(d, "b", prompt, num_prompt_logprobs=2) == 0
    assert len(d.told["b"].prompt_logprobs) == 99
    d.scheduler.flush()
    assert run(d, "c", prompt, num_prompt_logprobs=0) == 0
    assert run(d, "d", prompt) == 99


@pytest.mark.parametrize(
    ("reuse", "cached"), [(PrefixReuse.ALL, 108), (PrefixReuse.PREFILL, 100), (PrefixReuse.NONE, 0)]
)
def test_only_what_the_workers_vouch_for(reuse, cached):
    d = driver(prefix_reuse=reuse)
    run(d, "a", prompt_of(12, 100), 9)
    assert d.scheduler.num_cached_tokens == cached
    longer = prompt_of(12, 100) + tuple(d.told["a"].tokens)
    assert run(d, "b", (*longer, 1, 2), 9) == cached
    # What was prefilled again counts as prefilled.
    assert run(d, "c", (*longer, 1, 3), 9) == {108: 110, 100: 110, 0: 0}[cached]


def test_a_corrupted_request_leaves_nothing():
    d = driver(script=lambda tokens: CORRUPTED if len(tokens) == 102 else None)
    d.submit(make_request("a", prompt_of(13, 100), 9))
    d.run()
    assert d.told["a"].end.reason is FinishReason.ERROR
    assert d.scheduler.num_cached_tokens == 0
    d.script = d.worker.script = None
    assert run(d, "b", prompt_of(13, 100)) == 0


def test_a_flush_forgets_free_and_busy_slots():
    d = driver()
    run(d, "a", prompt_of(14, 100))
    d.submit(make_request("b", prompt_of(15, 100), 60))
    while len(d.told["b"].tokens) < 9:
        d.step()
    d.submit(make_request("c", prompt_of(16, 200), 5))
    d.step()
    assert d.scheduler.flush() == 104
    assert d.scheduler.num_cached_tokens == 0
    for name, seed in (("d", 14), ("e", 15), ("f", 16)):
        d.submit(make_request(name, prompt_of(seed, 150), 5))
        d.scheduler.check_integrity()
    d.run()
    assert [check(d, name) for name in "bcdef"] == [0] * 5
    assert d.scheduler.flush() == 3 * 154, "what was sent before the flush leaves nothing"
    assert d.scheduler.flush() == 0


def test_none_waits_for_what_a_flush_made_nobodys():
    d = driver(max_step_tokens=64, max_outstanding=1)
    d.submit(make_request("a", prompt_of(17, 400), 5))
    d.step()
    d.scheduler.flush()
    d.submit(make_request("b", prompt_of(17, 400)[:150], 5))
    assert [row.slot for row in d.plan().rows] == [0, 1]
    d.run()
    assert [check(d, name) for name in "ab"] == [0, 0]


def test_more_slots_than_run_keep_conversations_warm():
    d = driver(num_slots=6, max_running=2)
    prompts = {f"r{index}": prompt_of(20 + index, 100) for index in range(6)}
    for name, prompt in prompts.items():
        d.submit(make_request(name, prompt, 4))
    positions = {seat.decode_row for _ in range(3) for seat in d.scheduler.seats.values()}
    assert positions <= {0, 1}
    assert d.plan() is not None
    assert len(d.scheduler.seats) == 2
    d.run()
    for name, prompt in prompts.items():
        assert run(d, f"again-{name}", prompt) == 99


class Conversation:
    """`thinks`: the answer's first half is left out of the next prompt, behind another opening of
    the turn."""

    def __init__(self, d: Driver, number: int, thinks: bool) -> None:
        self.d, self.number, self.thinks = d, number, thinks
        self.turn = 0
        self.prompt = (*SYSTEM, *self._says(), 901, 902)
        self.cached: list[int] = []
        self.asked: list[int] = []

    def _says(self) -> tuple[int, ...]:
        return prompt_of(1000 * self.number + self.turn, 20)

    @property
    def name(self) -> str:
        return f"c{self.number}t{self.turn}"

    def ask(self) -> None:
        self.d.submit(make_request(self.name, self.prompt, 150, seed=self.number))

    def take_answer(self) -> None:
        self.cached.append(check(self.d, self.name))
        self.asked.append(len(self.prompt))
        answer = tuple(self.d.told[self.name].tokens)
        self.turn += 1
        kept = (*self.prompt[:-1], *answer[75:]) if self.thinks else (*self.prompt, *answer)
        self.prompt = (*kept, *self._says(), 901, 902)


def hits_alone(number: int, thinks: bool, num_turns: int) -> list[int]:
    conversation = Conversation(driver(num_slots=1), number, thinks)
    for _ in range(num_turns):
        conversation.ask()
        conversation.d.run()
        conversation.take_answer()
    return conversation.cached


@pytest.mark.parametrize("order", ["in turn", "at once", "shuffled"])
@pytest.mark.parametrize("thinks", [False, True])
def test_eight_conversations_hit_as_much_as_each_alone(thinks, order):
    d = driver(num_slots=8, max_step_tokens=256)
    conversations = [Conversation(d, number, thinks) for number in range(8)]
    rng = random.Random(5)
    for _ in range(8):
        if order == "shuffled":
            rng.shuffle(conversations)
        for conversation in conversations:
            conversation.ask()
            if order == "in turn":
                d.run()
        d.run()
        for conversation in conversations:
            conversation.take_answer()
    for conversation in conversations:
        alone = hits_alone(conversation.number, thinks, 8)
        assert all(here >= there for here, there in zip(conversation.cached, alone, strict=True))
        assert conversation.cached[1:] == alone[1:]
    # All but the first one found the system prompt too.
    assert sorted(c.cached[0] for c in conversations) == [0] + [100] * 7


def test_a_newcomer_takes_no_conversations_slot_while_another_is_to_be_had():
    d = driver(num_slots=3)
    run(d, "a", SYSTEM + prompt_of(1, 10), 40)
    run(d, "b", SYSTEM + prompt_of(2, 10), 40)
    for name, number in (("a", 1), ("b", 2)):
        longer = SYSTEM + prompt_of(number, 10) + tuple(d.told[name].tokens)
        assert run(d, f"more-{name}", (*longer, 1, 2, 3), 4) == 149


def test_one_lets_pass_whoever_takes_its_source_and_keeps_it():
    d = driver(num_slots=2, max_step_tokens=400)
    run(d, "a", prompt_of(30, 100))
    for name in "bc":
        d.submit(make_request(name, prompt_of(30, 100), 4, seed=ord(name)))
    assert [row.slot for row in d.plan().rows] == [0]
    copy = d.plan().rows[-1]
    assert (copy.slot, copy.prefix.source_slot, copy.prefix.length) == (1, 0, 99)
    d.run()
    assert [check(d, name) for name in "bc"] == [99, 99]


def test_a_source_that_starts_anew_in_the_same_command_is_not_named():
    """Slot 0 is taken by a stranger, in a row before that of one that shares what it holds."""
    d = driver(num_slots=2, max_step_tokens=400)
    run(d, "a", prompt_of(30, 100))
    run(d, "b", prompt_of(31, 100))
    d.submit(make_request("stranger", prompt_of(32, 100), 4))
    d.submit(make_request("shares", prompt_of(30, 60) + prompt_of(33, 60), 4))
    rows = d.plan().rows
    assert [row.slot for row in rows] == [0, 1]
    assert [row.prefix for row in rows] == [None, None]
    d.run()
    for name in ("stranger", "shares"):
        check(d, name)


def test_a_source_that_starts_anew_later_in_the_command_may_be_named():
    d = driver(num_slots=2, max_step_tokens=400)
    run(d, "a", prompt_of(30, 100))
    run(d, "b", prompt_of(31, 100))
    # Slot 0 goes to the first one: its source is slot 1, which the second one takes.
    d.submit(make_request("shares", prompt_of(31, 60) + prompt_of(33, 60), 4))
    d.submit(make_request("stranger", prompt_of(32, 100), 4))
    first = d.plan().rows[0]
    assert (first.slot, first.prefix.source_slot, first.prefix.length) == (0, 1, 60)
    d.run()
    assert check(d, "shares") == 60
    check(d, "stranger")


def test_one_that_waits_goes_on_when_what_it_waits_for_goes_away():
    d = driver(num_slots=3, max_step_tokens=64, max_outstanding=1)
    prompt = prompt_of(40, 500)
    for name in "abc":
        d.submit(make_request(name, prompt, 4))
    d.step()
    assert [len(row.token_ids) for row in d.plan().rows] == [64]
    d.cancel("a")
    d.answer()
    chunk = d.plan().rows[0]
    assert (chunk.start, chunk.prefix.length) == (128, 128)
    d.run()
    assert [check(d, name) for name in "bc"] == [128, 499]


def test_one_that_waits_holds_nobody_back():
    d = driver(num_slots=3, max_step_tokens=64, max_outstanding=1)
    d.submit(make_request("a", prompt_of(40, 480), 4))
    d.submit(make_request("b", prompt_of(40, 480), 4))
    d.submit(make_request("c", prompt_of(41, 20), 4))
    assert [(row.slot, len(row.token_ids)) for row in d.plan().rows] == [(0, 44), (2, 20)]
    d.run()
    assert [check(d, name) for name in "abc"] == [0, 479, 0]


def test_a_copy_whose_seat_has_no_share_of_the_step_is_sent_later():
    d = driver(num_slots=4, max_step_tokens=8)
    run(d, "a", prompt_of(42, 40))
    for name, seed in (("long", 43), ("longer", 44)):
        d.submit(make_request(name, prompt_of(seed, 60), 3))
    d.submit(make_request("shares", prompt_of(42, 30) + prompt_of(45, 70), 3))
    chunks = [row for row in d.plan().rows if isinstance(row, PrefillChunk)]
    assert 3 not in [chunk.slot for chunk in chunks]
    d.run()
    assert check(d, "shares") == 30
    for name in ("long", "longer"):
        check(d, name)


@pytest.mark.parametrize("lost_after", range(8))
def test_after_a_rebuild_slots_are_empty_and_seats_share_again(lost_after):
    d = driver(num_slots=4, max_step_tokens=64, max_steps_per_command=2)
    run(d, "before", SYSTEM + prompt_of(50, 50))
    for index in range(3):
        d.submit(make_request(f"r{index}", SYSTEM + prompt_of(51, 80), 20, seed=index))
    for _ in range(lost_after):
        d.step()
    cached = {name: told.request.num_cached_tokens for name, told in d.told.items()}
    placed = {name for name, told in d.told.items() if told.request.is_placed}
    d.lose_worker()
    assert d.scheduler.num_cached_tokens == 0
    d.scheduler.check_integrity()
    d.run()
    for name in ("r0", "r1", "r2"):
        check(d, name)
        if name in placed:
            assert d.told[name].end.num_cached_tokens == cached[name]
    # The prompt was computed once, but for what each has of its own.
    assert d.worker.num_prefill_tokens <= 180 + 3 * 24


def test_evictions_are_counted():
    d = driver(num_slots=1)
    run(d, "a", prompt_of(60, 50), 5)
    run(d, "b", prompt_of(61, 30), 5)
    run(d, "c", prompt_of(61, 30), 5)
    c = counters(d)
    assert (c.num_evictions, c.num_evicted_tokens) == (2, 54 + 5)


def test_the_same_slots_are_chosen_each_time():
    def placements():
        d = driver(num_slots=4)
        rng = random.Random(3)
        slots = []
        for index in range(40):
            prompt = SYSTEM[: rng.choice((20, 60, 100))] + prompt_of(rng.randrange(6), 40)
            d.submit(make_request(f"r{index}", prompt, rng.randrange(1, 9)))
            for _ in range(rng.randrange(4)):
                d.step()
        d.run()
        slots += [(told.request.num_cached_tokens, told.tokens) for told in d.told.values()]
        return slots

    assert placements() == placements()


def test_hits_add_up():
    d = driver(num_slots=3)
    for first, second in itertools.product(range(4), range(3)):
        d.submit(make_request(f"r{first}{second}", prompt_of(first, 50) + prompt_of(second, 50), 3))
    d.run()
    c = counters(d)
    cached = [told.request.num_cached_tokens for told in d.told.values()]
    assert c.num_hit_tokens == sum(cached) > 0
    assert c.num_hits == sum(number > 0 for number in cached)
    assert c.num_queried_tokens == 1200
    assert c.num_copied_tokens == d.worker.num_copied_tokens
    assert d.worker.num_prefill_tokens == 1200 - sum(cached)
