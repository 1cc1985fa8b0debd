"""Who may wait, who is next, and who is not started because it would be too late."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver, make_limits, make_request

from scheduler_service.errors import QueueFullError
from scheduler_service.prefix_index import PrefixReuse
from scheduler_service.request import ClientLimits, FinishReason
from scheduler_service.step_plan import PrefillPace

PROMPT_TOKEN_NS = 10_000
LONG = 60_000


def driver(**changes) -> Driver:
    limits = {
        "num_slots": 8,
        "max_seq_len": 1 << 17,
        "max_step_tokens": 2048,
        "max_mixed_step_tokens": 512,
    }
    d = Driver(make_limits(**limits | changes))
    d.worker.prompt_token_ns = PROMPT_TOKEN_NS
    return d


def test_of_500_at_once_those_that_fit_are_accepted_and_finish():
    d = driver(max_queue_len=64, max_seq_len=64)
    accepted, waits = [], []
    for index in range(500):
        try:
            d.submit(make_request(f"r{index}"))
        except QueueFullError as error:
            waits.append(error.retry_after_s)
        else:
            accepted.append(f"r{index}")
    assert (len(accepted), len(waits)) == (72, 428)
    assert accepted == [f"r{index}" for index in range(72)]
    assert all(0.1 <= wait_s <= 60 for wait_s in waits)
    d.run()
    assert list(d.told) == accepted
    assert all(told.end.reason is FinishReason.LENGTH for told in d.told.values())


def test_the_bound_in_tokens_holds_while_there_is_room_for_requests():
    d = driver(num_slots=1, max_queue_len=64, max_queued_tokens=100)
    d.submit(make_request("running"))
    d.plan()
    d.submit(make_request("a", (1,) * 60))
    with pytest.raises(QueueFullError, match=r"60 prompt .* has 41, .* 100"):
        d.submit(make_request("b", (1,) * 41))
    d.submit(make_request("b", (1,) * 40))
    d.run()
    assert d.told["b"].end.reason is FinishReason.LENGTH


def warmed_up(**changes) -> Driver:
    """A full step was seen: 10 us a prompt token, and 1 ms."""
    d = driver(**changes)
    d.submit(make_request("warm", (7,) * 2048, max_new_tokens=1))
    d.run()
    assert d.told["warm"].end.reason is FinishReason.LENGTH
    return d


def test_b12_a_doomed_prefill_is_not_started():
    d = warmed_up()
    start_ns = d.now_ns
    in_time_ns = d.now_ns + 700_000_000
    too_late_ns = d.now_ns + 500_000_000
    d.submit(make_request("doomed", (1,) * LONG, deadline_ns=too_late_ns))
    d.submit(make_request("in_time", (2,) * LONG, deadline_ns=in_time_ns))
    d.plan()
    end = d.told["doomed"].end
    assert end.reason is FinishReason.DEADLINE
    assert "not started" in end.message
    assert "60000 tokens takes at least 0.629 s" in end.message
    assert "deadline is in 0.5 s" in end.message
    assert (end.num_generated_tokens, d.now_ns) == (0, start_ns)
    assert "doomed" not in d.admitted
    d.run()
    assert d.told["in_time"].end.reason is FinishReason.LENGTH
    counters = d.scheduler.counters
    assert (counters.deadline, counters.length, counters.accepted) == (1, 2, 3)


def test_nothing_is_refused_while_nothing_is_known():
    d = driver()
    d.submit(make_request("a", (1,) * LONG, deadline_ns=50_000_000))
    d.step()
    assert d.told["a"].request.admitted_ns is not None
    d.run()
    assert d.told["a"].end.reason is FinishReason.DEADLINE
    assert "not started" not in d.told["a"].end.message


def test_short_prompts_say_nothing_of_long_ones():
    d = driver()
    for index in range(20):
        d.submit(make_request(f"short{index}", (1, index), max_new_tokens=1))
        d.run()
    d.submit(make_request("long", (2,) * LONG, deadline_ns=d.now_ns + 1_000_000_000))
    d.run()
    assert d.told["long"].end.reason is FinishReason.LENGTH


def test_what_the_cache_holds_takes_no_time():
    d = warmed_up()
    prompt = (3,) * LONG
    d.submit(make_request("first", prompt, max_new_tokens=1))
    d.run()
    soon_ns = d.now_ns + 20_000_000
    d.submit(make_request("again", (*prompt, 4), max_new_tokens=2, deadline_ns=soon_ns))
    d.submit(make_request("salted", prompt, deadline_ns=soon_ns, cache_salt="x"))
    d.run()
    assert d.told["again"].end.reason is FinishReason.LENGTH
    assert "not started" in d.told["salted"].end.message


def test_what_another_prompt_is_about_to_write_takes_no_time_of_its_own():
    d = warmed_up()
    prompt = (3,) * LONG
    d.submit(make_request("first", prompt, max_new_tokens=1))
    for _ in range(20):
        d.step()
    left_ns = (LONG - 20 * 2048) * PROMPT_TOKEN_NS
    deadline_ns = d.now_ns + left_ns + 60_000_000
    d.submit(make_request("beside", prompt, max_new_tokens=1, deadline_ns=deadline_ns))
    d.run()
    assert d.told["beside"].end.reason is FinishReason.LENGTH


def test_doomed_ones_do_not_hold_up_those_behind():
    d = warmed_up(num_slots=2)
    for index in range(5):
        d.submit(make_request(f"doomed{index}", (1,) * LONG, deadline_ns=d.now_ns + 10_000_000))
        d.submit(make_request(f"good{index}", max_new_tokens=2))
    d.plan()
    assert [name for name in d.told if d.told[name].end and name != "warm"] == ["doomed0"]
    assert set(d.admitted) >= {"good0"}
    d.run()
    assert sum("not started" in told.end.message for told in d.told.values()) == 5
    assert d.scheduler.counters.length == 6


def test_one_past_its_deadline_ends_before_anything_is_planned():
    d = driver()
    d.now_ns = 1000
    d.submit(make_request("a", deadline_ns=1000))
    assert d.plan() is None
    assert d.told["a"].end.reason is FinishReason.DEADLINE
    assert (d.scheduler.counters.accepted, d.scheduler.counters.deadline) == (1, 1)


def test_the_best_of_the_latest_full_steps_counts():
    pace = PrefillPace(min_step_tokens=100)
    assert pace.least_ns(1000) == 0
    pace.observe(50, 99)
    assert pace.least_ns(1000) == 0
    pace.observe(10_000, 100)
    pace.observe(5_000, 100)
    pace.observe(8_000, 200)
    assert pace.least_ns(1000) == 40_000
    for _ in range(256):
        pace.observe(20_000, 100)
    assert pace.least_ns(1000) == 200_000


@pytest.mark.parametrize("fair_share", [False, True])
def test_b44_one_clients_flood_delays_anothers_request_by_those_that_run(fair_share):
    d = driver(num_slots=4, max_queue_len=1000, fair_share=fair_share, max_seq_len=64)
    for index in range(500):
        d.submit(make_request(f"flood{index}", client="flood"))
    for _ in range(3):
        d.step()
    num_before = len(d.admitted)
    d.submit(make_request("one", client="other"))
    d.run()
    place = list(d.admitted).index("one")
    assert place < num_before + 4 if fair_share else place == 500


def test_shares_are_even_over_time():
    d = driver(num_slots=3, max_queue_len=1000, fair_share=True, max_seq_len=64)
    for client, number in (("a", 300), ("b", 100), ("c", 20)):
        for index in range(number):
            d.submit(make_request(f"{client}{index}", client=client))
    d.run()
    first = [name[0] for name in list(d.admitted)[:60]]
    assert [first.count(client) for client in "abc"] == [20, 20, 20]
    for client in "abc":
        names = [name for name in d.admitted if name[0] == client]
        assert names == sorted(names, key=lambda name: int(name[1:]))


def test_a_client_with_limits_of_its_own():
    d = driver(num_slots=4, max_seq_len=64, prefix_reuse=PrefixReuse.NONE)
    fields = {"client": "x", "client_limits": ClientLimits(max_running=1, max_waiting=2)}
    for name in "abc":
        d.submit(make_request(name, max_new_tokens=20, **fields))
    with pytest.raises(QueueFullError, match=r"3 requests of this client .* is 2") as caught:
        d.submit(make_request("d", **fields))
    # One of its own must end; one of four does not do.
    assert caught.value.retry_after_s == 1.0
    d.submit(make_request("other", max_new_tokens=20))
    d.plan()
    assert sorted(d.admitted) == ["a", "other"]
    d.run()
    assert list(d.admitted) == ["a", "other", "b", "c"]
    assert all(told.end.reason is FinishReason.LENGTH for told in d.told.values())


def test_a_bound_for_every_client():
    d = driver(num_slots=1, max_waiting_per_client=2, max_seq_len=64)
    for name in "abc":
        d.submit(make_request(name, client="x"))
    with pytest.raises(QueueFullError, match="the limit for one client is 2"):
        d.submit(make_request("d", client="x"))
    d.submit(make_request("d", client="y"))
    d.run()
    assert d.scheduler.counters.length == 4


def test_the_tokens_of_a_former_life_take_their_time_too():
    d = warmed_up()
    tokens = [1] * (LONG // 2)
    fields = {"generated_token_ids": tokens, "deadline_ns": d.now_ns + 500_000_000}
    d.resume(make_request("doomed", tuple(tokens), LONG, **fields))
    d.plan()
    assert "not started" in d.told["doomed"].end.message
