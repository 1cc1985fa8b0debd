"""Reading on: every token and every piece of text exactly once, whoever went away."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
from fake_engine import FakeEngine, accepting, call, ids, is_known
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import write_model

from scheduler_service.answers import FROM_START, ReadFrom, Update
from scheduler_service.auth import Caller
from scheduler_service.calls import TOKEN_PART, Generation
from scheduler_service.errors import (
    CorruptedError,
    DuplicateRequestError,
    ExpiredRequestError,
    InvalidArgumentError,
    NotEndedError,
    OutOfRangeError,
    PermissionDeniedError,
    SetupDiffersError,
    SupersededError,
    UnknownRequestError,
)
from scheduler_service.journal import Journal, RecordedCall
from scheduler_service.record import AnswerLog
from scheduler_service.request import (
    FinishedEvent,
    FinishReason,
    PromptLogprobsEvent,
    TokenEvent,
    TokenLogprobs,
    choice_id,
)
from scheduler_service.service import Accepting, InferenceService, Survival, load_model

ME = Caller()
WAIT_S = 60
END = FinishedEvent("r", FinishReason.LENGTH, 1, 0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("model")), "")


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def service(model, engine):
    return InferenceService(model, engine)


class Received:
    """What a client has of one answer, by the rules of the API."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.next_index = 0
        self.has_end = False

    def add(self, update: Update, *, with_tail: bool = True, with_end: bool = True) -> None:
        """As messages.responses cuts it."""
        if not update.is_empty:
            assert update.first_token_index == self.next_index
            self.token_ids += update.token_ids
            self.text += update.text
            self.next_index += len(update.token_ids)
        if update.tail.text and with_tail:
            self.text += update.tail.text
            self.next_index += 1
        self.has_end = self.has_end or (update.end is not None and with_end)


async def read_to_end(generation: Generation, received: Received) -> None:
    while not generation.has_ended:
        for update in await generation.next():
            received.add(update)


async def next_turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  (a timer of the service fires, and tells nobody)
            await asyncio.sleep(0.01)


def open_journal(folder):
    """With time for a slow disk: what is late is not in it."""
    return Journal.open(folder, max_bytes=1 << 20, retention_s=3600.0, accept_timeout_s=WAIT_S)


def attach(service, call_id, caller, asked, places):
    return service.attach(service.find(call_id, caller), asked, places)


TEXTS = st.text(st.sampled_from("abc<>é👨 \n"), max_size=12)


@settings(max_examples=60)
@given(
    data=st.data(),
    text=TEXTS,
    stop=st.lists(st.sampled_from(["bc", "aé", "👨", "<>a"]), max_size=2, unique=True),
    loses=st.sampled_from(["nothing", "tail", "end"]),
)
def test_each_token_and_each_character_exactly_once(model, data, text, stop, loses):
    """A client that is cut off anywhere, also behind the last token, and reads on."""

    async def run() -> None:
        engine = FakeEngine()
        service = InferenceService(model, engine)
        tokens = ids(model, text)
        asked = call(stop=tuple(stop), attach_window_s=9.0)
        whole, cut = Received(), Received()
        async with await service.begin(asked, accepting()) as generation:
            if tokens:
                engine.tokens(0, *tokens)
            engine.finish(FinishReason.LENGTH, len(tokens))
            await read_to_end(generation, whole)
        engine = FakeEngine()
        service = InferenceService(model, engine)
        where = data.draw(st.integers(0, len(tokens)))
        async with await service.begin(asked, accepting()) as generation:
            given_ids = tokens[:where]
            if given_ids:
                engine.tokens(0, *given_ids)
                for update in await generation.next():
                    cut.add(update)
            if where == len(tokens) and loses != "nothing":
                engine.finish(FinishReason.LENGTH, len(tokens))
                for update in await generation.next():
                    cut.add(update, with_tail=loses == "end", with_end=False)
        place = ReadFrom(cut.next_index)
        async with attach(service, "r", ME, asked, [place]) as generation:
            if engine.stream.logs["r"].end is None:
                if tokens[where:]:
                    engine.tokens(where, *tokens[where:])
                engine.finish(FinishReason.LENGTH, len(tokens))
            await read_to_end(generation, cut)
        assert (cut.token_ids, cut.text, cut.has_end) == (whole.token_ids, whole.text, True)
        service.calls.close()

    asyncio.run(run())


async def test_a_new_reader_takes_the_place_of_the_old_one(service, engine, model):
    a, b = ids(model, "ab")
    first, second = Received(), Received()
    asked = call()
    async with await service.begin(asked, accepting()) as old:
        engine.tokens(0, a)
        for update in await old.next():
            first.add(update)
        waiting = asyncio.ensure_future(old.next())
        await next_turns()
        async with attach(service, "r", ME, asked, [FROM_START]) as new:
            with pytest.raises(SupersededError, match="another connection"):
                await waiting
            with pytest.raises(SupersededError):
                await old.next()
            old.close()
            assert engine.cancelled == []
            engine.tokens(1, b)
            engine.finish(FinishReason.LENGTH, 2)
            await read_to_end(new, second)
    assert (first.text, second.text) == ("a", "ab")
    assert engine.cancelled == []


async def test_what_was_not_yet_read_is_not_lost_nor_doubled(service, engine, model):
    a, b, c = ids(model, "abc")
    received = Received()
    asked = call()
    async with await service.begin(asked, accepting()):
        engine.tokens(0, a)
        engine.tokens(1, b)
        async with attach(service, "r", ME, asked, [ReadFrom(1)]) as new:
            engine.tokens(2, c)
            engine.finish(FinishReason.LENGTH, 3)
            received.next_index = 1
            await read_to_end(new, received)
    assert received.text == "bc"


async def test_it_goes_on_without_a_reader_and_stop_strings_are_found(service, engine, model):
    asked = call(stop=("bc",), attach_window_s=9.0)
    async with await service.begin(asked, accepting()):
        assert service.calls.num_unread == 0
    assert engine.cancelled == []
    assert service.calls.num_unread == 1
    engine.tokens(0, *ids(model, "abcd"))
    await next_turns()
    assert engine.stopped == [("r", 3)]
    engine.finish(FinishReason.STOP, 3)
    await next_turns()
    assert service.calls.num_unread == 0
    received = Received()
    async with attach(service, "r", ME, asked, [FROM_START]) as generation:
        (update,) = await generation.next()
        received.add(update)
        assert update.end.matched_stop == "bc"
        assert update.end.event.num_generated_tokens == 3
    assert received.text == "a"
    assert received.token_ids == ids(model, "abc")


async def test_without_a_window_it_ends_with_its_connection(service, engine):
    async with await service.begin(call(), accepting()):
        pass
    assert engine.cancelled == [("r", FinishReason.CANCELLED)]


async def test_a_window_that_passes_cancels(service, engine):
    async with await service.begin(call(attach_window_s=0.01), accepting()):
        pass
    assert engine.cancelled == []
    await until(lambda: engine.cancelled)
    assert engine.cancelled == [("r", FinishReason.CANCELLED)]


async def test_a_reader_in_time_stops_the_window(service, engine, model):
    asked = call(attach_window_s=0.05)
    async with await service.begin(asked, accepting()):
        pass
    async with attach(service, "r", ME, asked, [FROM_START]) as generation:
        await asyncio.sleep(0.1)
        assert engine.cancelled == []
        engine.finish(FinishReason.LENGTH)
        await read_to_end(generation, Received())
    assert engine.cancelled == []


async def test_indices_beyond_what_was_told(service, engine, model):
    asked = call(n=2)
    async with await service.begin(asked, accepting()):
        engine.tokens(0, *ids(model, "ab"))
        engine.tokens(0, *ids(model, "a"), answer=1)
        with pytest.raises(OutOfRangeError, match=r"3 is beyond .* answer 0 .*: 2 tokens"):
            attach(service, "r", ME, asked, [ReadFrom(3)])
        with pytest.raises(OutOfRangeError, match="answer 1"):
            attach(service, "r", ME, asked, [ReadFrom(2), ReadFrom(2)])
        with pytest.raises(InvalidArgumentError, match="other_next_token_indices"):
            attach(service, "r", ME, asked, [FROM_START] * 3)
        # Nobody was disturbed.
        assert engine.stream is service.calls.find("r").stream


async def test_one_beyond_the_end_is_for_a_tail_alone(service, engine, model):
    asked = call(stop=("bcd",))
    for text, held in (("abc", "bc"), ("a", "")):
        async with await service.begin(asked, accepting()) as generation:
            tokens = ids(model, text)
            engine.tokens(0, *tokens)
            engine.finish(FinishReason.LENGTH, len(tokens))
            await read_to_end(generation, Received())
        async with attach(service, "r", ME, asked, [ReadFrom(len(tokens))]) as generation:
            (update,) = await generation.next()
            assert update.tail.text == held
        async with attach(service, "r", ME, asked, [ReadFrom(len(tokens) + 1)]) as generation:
            if not held:
                with pytest.raises(OutOfRangeError, match="beyond the end"):
                    await generation.next()
                continue
            (update,) = await generation.next()
            assert update.tail.text == ""
            assert update.end is not None


async def test_an_index_beyond_the_end_of_one_answer_leaves_nothing_behind(service, engine, model):
    asked = call(n=2, attach_window_s=9.0)
    async with await service.begin(asked, accepting()):
        for answer in (1, 0):
            engine.tokens(0, *ids(model, "ab"), answer=answer)
            engine.finish(FinishReason.LENGTH, 2, answer=answer)
    await next_turns()
    assert service.calls.num_unread == 0
    places = [ReadFrom(3), FROM_START]
    async with attach(service, "r", ME, asked, places) as generation:
        with pytest.raises(OutOfRangeError, match="answer 0 has 2 tokens"):
            await generation.next()
        assert generation.has_ended
    assert service.calls.num_unread == 0


async def test_an_answer_that_fails_without_a_reader_ends_no_other(service, engine, model):
    """What came in the same moment is taken in too, or its stop string would be missed."""
    asked = call(n=2, stop=("bc",), attach_window_s=9.0)
    async with await service.begin(asked, accepting()):
        pass
    engine.finish(FinishReason.ERROR, message="no token fits", status="FAILED_PRECONDITION")
    engine.tokens(0, *ids(model, "ab"), answer=1)
    await next_turns()
    assert service.calls.num_unread == 1
    engine.tokens(2, *ids(model, "cd"), answer=1)
    await next_turns()
    assert engine.stopped == [(choice_id("r", 1), 3)]
    service.calls.close()


async def test_unknown_foreign_and_expired(model, engine):
    service = InferenceService(model, engine, Survival(retention_s=0.01))
    with pytest.raises(UnknownRequestError, match="'r' is known"):
        service.find("r", ME)
    alice, bob = Caller("alice", is_operator=False), Caller("bob", is_operator=False)
    async with await service.begin(call(), Accepting(alice, b"")) as generation:
        assert engine.requests[0].client == "alice"
        with pytest.raises(PermissionDeniedError, match="another caller's"):
            attach(service, "r", bob, call(), [FROM_START])
        with pytest.raises(PermissionDeniedError):
            service.cancel("r", bob)
        assert engine.cancelled == []
        service.find("r", Caller("root"), or_operator=True)
        engine.finish(FinishReason.LENGTH)
        await read_to_end(generation, Received())
    await until(lambda: not is_known(service, "r"))
    with pytest.raises(ExpiredRequestError, match=r"0\.01 s"):
        service.find("r", alice)


async def test_the_oldest_go_first_when_memory_runs_short(model, engine):
    service = InferenceService(model, engine, Survival(max_kept_bytes=6000))
    for name in ("one", "two", "three"):
        async with await service.begin(replace(call(), request_id=name), accepting()):
            engine.stream.push(replace(END, request_id=name))
    assert [is_known(service, name) for name in ("one", "two", "three")] == [
        False,
        True,
        True,
    ]
    with pytest.raises(ExpiredRequestError):
        service.find("one", ME)


async def test_an_id_that_is_used_again_is_the_new_calls(service, engine, model):
    for text in ("ab", "c"):
        async with await service.begin(call(), accepting()) as generation:
            engine.tokens(0, *ids(model, text))
            engine.finish(FinishReason.LENGTH, len(text))
            await read_to_end(generation, Received())
    received = Received()
    async with attach(service, "r", ME, call(), [FROM_START]) as generation:
        await read_to_end(generation, received)
    assert received.text == "c"


async def test_who_leaves_after_the_end_does_not_cancel_the_next_call_of_that_id(service, engine):
    async with await service.begin(call(), accepting()):
        engine.finish(FinishReason.LENGTH)
        await service.begin(call(), accepting())
    assert engine.cancelled == []


async def test_a_kept_id_is_not_another_clients_to_replace(service, engine, model):
    alice, bob = Caller("alice", is_operator=False), Caller("bob", is_operator=False)
    async with await service.begin(call(), Accepting(alice, b"")) as generation:
        engine.finish(FinishReason.LENGTH)
        await read_to_end(generation, Received())
    with pytest.raises(DuplicateRequestError, match="known already"):
        await service.begin(call(), Accepting(bob, b""))
    assert len(engine.requests) == 1
    service.find("r", alice)
    async with await service.begin(call(), Accepting(alice, b"")):
        assert len(engine.requests) == 2


async def test_prompt_logprobs_that_cannot_have_come(service, engine, model):
    asked = replace(call(), prompt=replace(call().prompt, token_ids=(5, 6, 7)))
    for number, bound, words in ((None, 0, "no logprobs"), (0, 3, "those of 3 prompt tokens")):
        with_logprobs = replace(asked, prompt_logprobs=number, request_id=f"r{bound}")
        async with await service.begin(with_logprobs, accepting()):
            attach(service, f"r{bound}", ME, with_logprobs, [ReadFrom(0, prompt_index=1)])
            place = ReadFrom(0, prompt_index=bound + 2)
            with pytest.raises(OutOfRangeError, match=f"{bound + 2} is beyond .* {words}"):
                attach(service, f"r{bound}", ME, with_logprobs, [place])


async def test_an_end_that_is_an_error_comes_behind_its_tokens(service, engine, model):
    asked = call()
    async with await service.begin(asked, accepting()) as generation:
        engine.tokens(0, *ids(model, "ab"))
        engine.finish(FinishReason.ERROR, 2, message="nan", status="INTERNAL")
        (update,) = await generation.next()
        assert update.text == "ab"
        with pytest.raises(CorruptedError, match="nan"):
            await generation.next()
    async with attach(service, "r", ME, asked, [ReadFrom(1)]) as generation:
        (update,) = await generation.next()
        assert (update.first_token_index, update.text) == (1, "b")
        with pytest.raises(CorruptedError, match="nan"):
            await generation.next()


async def test_long_answers_are_told_again_in_parts(service, engine, model):
    engine.max_seq_len = 4 * TOKEN_PART
    asked = call(attach_window_s=9.0)
    count = 2 * TOKEN_PART + 10
    async with await service.begin(asked, accepting()):
        engine.tokens(0, *(ids(model, "a") * count))
        engine.finish(FinishReason.LENGTH, count)
    received = Received()
    received.next_index = 5
    async with attach(service, "r", ME, asked, [ReadFrom(5)]) as generation:
        sizes = []
        while not generation.has_ended:
            for update in await generation.next():
                sizes.append(len(update.token_ids))
                received.add(update)
    assert received.text == "a" * (count - 5)
    assert max(sizes) <= TOKEN_PART + 1


async def test_prompt_logprobs_are_told_from_where_they_were_lost(service, engine, model):
    prompt = tuple(ids(model, "abcd"))
    asked = replace(call(prompt_logprobs=0), prompt=replace(call().prompt, token_ids=prompt))
    found = tuple(TokenLogprobs(-float(index), 1, (), ()) for index in (1, 2, 3))
    async with await service.begin(asked, accepting()):
        engine.stream.push(PromptLogprobsEvent("r", 1, found))
        place = ReadFrom(0, prompt_index=3)
        async with attach(service, "r", ME, asked, [place]) as generation:
            (update,) = await generation.next()
            assert update.first_prompt_index == 3
            assert [one.token.logprob for one in update.prompt_logprobs] == [-3.0]


async def test_a_replay_is_the_same_request_again(service, engine, model):
    asked = call(temperature=0.5, top_k=7, stop_token_ids=(9,))
    async with await service.begin(asked, accepting()) as generation:
        with pytest.raises(NotEndedError, match="still runs"):
            await service.replay(service.find("r", ME), accepting(), asked)
        engine.tokens(0, *ids(model, "ab"))
        engine.finish(FinishReason.LENGTH, 2)
        await read_to_end(generation, Received())
    known = service.find("r", ME)
    async with await service.replay(known, accepting(), asked):
        first, again = engine.requests
        assert again.request_id != first.request_id
        assert again.sampling == first.sampling
        assert again.prompt_token_ids == first.prompt_token_ids
        assert again.end_token_ids == first.end_token_ids
        assert again.max_new_tokens == first.max_new_tokens
    engine.build = "another"
    with pytest.raises(SetupDiffersError, match="build is 'another' and was 'b'"):
        await service.replay(known, accepting(), asked)


def recorded(known, *answers: AnswerLog):
    return RecordedCall(replace(known.record, call_id="old"), list(answers), None)


async def test_a_former_lifes_request_goes_on(service, engine, model):
    a, b, c = ids(model, "abc")
    asked = call(attach_window_s=9.0)
    async with await service.begin(asked, accepting()):
        pass
    known = service.find("r", ME)
    await service.resume(recorded(known, AnswerLog(array("I", [a, b]))), asked)
    request = engine.requests[-1]
    assert (request.request_id, request.generated_token_ids) == ("old", [a, b])
    assert request.sampling == engine.requests[0].sampling
    assert service.num_resumed == 1
    # A client may have more of it than the journal.
    received = Received()
    received.next_index = 3
    async with attach(service, "old", ME, asked, [ReadFrom(3)]) as generation:
        engine.stream.push(TokenEvent("old", 2, (c,)))
        engine.stream.push(TokenEvent("old", 3, (a,)))
        engine.stream.push(replace(END, request_id="old", num_generated_tokens=4))
        await read_to_end(generation, received)
    assert received.text == "a"


async def test_a_former_lifes_end_can_be_read(service, engine, model):
    asked = call()
    async with await service.begin(asked, accepting()):
        pass
    known = service.find("r", ME)
    tokens = ids(model, "ab")
    log = AnswerLog(array("I", tokens), end=replace(END, request_id="old", num_generated_tokens=2))
    await service.resume(recorded(known, log), asked)
    assert service.num_resumed == 0
    assert len(engine.requests) == 1
    engine.known = False
    received = Received()
    async with attach(service, "old", ME, asked, [FROM_START]) as generation:
        await read_to_end(generation, received)
    assert received.text == "ab"


async def test_another_set_up_does_not_go_on(service, engine, model):
    """Its tokens might change in the middle."""
    asked = call()
    async with await service.begin(asked, accepting()):
        pass
    known = service.find("r", ME)
    engine.build = "another"
    await service.resume(recorded(known, AnswerLog(array("I", ids(model, "a")))), asked)
    assert len(engine.requests) == 1
    engine.known = False
    async with attach(service, "old", ME, asked, [FROM_START]) as generation:
        (update,) = await generation.next()
        assert update.text == "a"
        with pytest.raises(Exception, match="build is 'another'"):
            await generation.next()


async def test_clients_share_no_prefixes_with_each_other(service, engine):
    """Who is told apart; a salt of a client's own tells its tenants apart."""
    callers = [Caller(name, is_operator=False) for name in ("alice", "bob")]
    for number, caller in enumerate([*callers, ME]):
        for salt in ("", "t"):
            asked = replace(call(cache_salt=salt), request_id=f"{number}{salt}")
            await service.begin(asked, Accepting(caller, b""))
    assert len({request.cache_salt for request in engine.requests}) == 6
    assert [request.cache_salt for request in engine.requests[-2:]] == ["", "t"]


async def test_each_that_has_ended_is_forgotten_in_its_time(model, engine):
    """Also when none ends after it."""
    service = InferenceService(model, engine, Survival(retention_s=0.1))
    for name in ("one", "two"):
        async with await service.begin(replace(call(), request_id=name), accepting()):
            engine.stream.push(replace(END, request_id=name))
        await asyncio.sleep(0.03)
    await until(lambda: not is_known(service, "two"))


async def test_what_was_told_counts_as_memory(model, engine):
    engine.max_seq_len = 4096
    service = InferenceService(model, engine, Survival(max_kept_bytes=6000))
    async with await service.begin(call(), accepting()):
        engine.tokens(0, *(ids(model, "a") * 2000))
        engine.finish(FinishReason.LENGTH, 2000)
    assert not is_known(service, "r")


async def test_an_attached_reader_that_leaves_has_no_deadline(service, engine):
    asked = call(attach_window_s=9.0)
    async with await service.begin(asked, accepting(deadline_ns=200)) as generation:
        async with attach(service, "r", ME, asked, [FROM_START]):
            engine.clock_ns = 300
        assert engine.cancelled == []
        assert service.calls.num_unread == 1
        generation.close()
    service.calls.close()


@pytest.mark.parametrize("is_stopping", [False, True])
async def test_an_end_is_in_the_journal_unless_the_next_life_goes_on(
    model, engine, tmp_path, is_stopping
):
    journal, _ = open_journal(tmp_path)
    service = InferenceService(model, engine, Survival(journal))
    async with await service.begin(call(), accepting()) as generation:
        assert await generation.is_journaled()
        if is_stopping:
            service.calls.stop()
        engine.finish(FinishReason.ERROR, message="lost", status="UNAVAILABLE")
    journal.close()
    journal, (found,) = open_journal(tmp_path)
    journal.close()
    assert (found.ended_unix_ns is None) == is_stopping


async def test_what_an_attached_reader_is_told_is_written_down(model, engine, tmp_path):
    journal, _ = open_journal(tmp_path)
    service = InferenceService(model, engine, Survival(journal, retention_s=0.01))
    asked, (a, b) = call(), ids(model, "ab")
    async with await service.begin(asked, accepting()) as generation:
        assert await generation.is_journaled()
        engine.tokens(0, a)
        async with attach(service, "r", ME, asked, [FROM_START]):
            engine.tokens(1, b)
            # Of what it is told, not yet of its end.
            journal.close()
            engine.finish(FinishReason.LENGTH, 2)
    await until(lambda: not is_known(service, "r"))
    journal, (found,) = open_journal(tmp_path)
    journal.close()
    assert list(found.answers[0].token_ids) == [a, b]


async def test_of_what_has_expired_the_latest_is_remembered(model, engine, monkeypatch):
    monkeypatch.setattr("scheduler_service.calls._MAX_EXPIRED", 1)
    service = InferenceService(model, engine, Survival(max_kept_bytes=0))
    for name in ("one", "two"):
        async with await service.begin(replace(call(), request_id=name), accepting()):
            engine.stream.push(replace(END, request_id=name))
    with pytest.raises(UnknownRequestError):
        service.find("one", ME)
    with pytest.raises(ExpiredRequestError):
        service.find("two", ME)


async def test_what_made_room_for_others_leaves_the_journal(model, engine, tmp_path):
    journal, _ = open_journal(tmp_path)
    service = InferenceService(model, engine, Survival(journal, max_kept_bytes=3000))
    for name in ("one", "two"):
        asked = replace(call(), request_id=name)
        async with await service.begin(asked, accepting()) as generation:
            assert await generation.is_journaled()
            engine.stream.push(replace(END, request_id=name))
    journal.close()
    journal, calls = open_journal(tmp_path)
    journal.close()
    assert [one.record.call_id for one in calls] == ["two"]


async def former(service, **changes):
    """The record of a call, as a former life of the server left it, and what it asked for."""
    async with await service.begin(call(), accepting()):
        pass
    record = replace(service.find("r", ME).record, call_id="old", **changes)
    return RecordedCall(record, [AnswerLog()], None), call()


async def test_a_restart_gives_readers_time_and_no_end_a_second_life(service, engine):
    found, asked = await former(service)
    await service.resume(found, asked)
    assert service.calls.num_unread == 1
    await asyncio.sleep(0.01)
    assert ("old", FinishReason.CANCELLED) not in engine.cancelled
    # Its time is over nearly, whenever the server was started.
    end = replace(END, request_id="ended")
    ended = replace(
        found,
        record=replace(found.record, call_id="ended"),
        answers=[AnswerLog(end=end)],
        ended_unix_ns=time.time_ns() - int((service.survival.retention_s - 0.05) * 1e9),
    )
    await service.resume(ended, asked)
    await until(lambda: not is_known(service, "ended"))
    service.calls.close()


async def test_a_former_lifes_request_is_its_clients_own(service, engine):
    found, asked = await former(service, client="alice")
    await service.resume(found, replace(asked, cache_salt="t"))
    request = engine.requests[-1]
    assert request.client == "alice"
    assert request.cache_salt not in ("", "t")
    service.calls.close()


async def test_prompt_logprobs_that_a_former_life_told_are_known(service, engine):
    found, asked = await former(service)
    found.answers[0].prompt_logprobs.append(TokenLogprobs(-1.0, 1, (), ()))
    await service.resume(found, asked)
    assert engine.requests[-1].num_prompt_logprobs_told == 1
    service.calls.close()


async def test_a_deadline_is_recorded_on_the_wall_clock(service, engine):
    before = time.time_ns()
    async with await service.begin(call(), accepting(engine.clock_ns + 5 * 10**9)):
        record = service.find("r", ME).record
    left_ns = record.deadline_unix_ns - record.accepted_unix_ns
    assert before - 10**9 < record.accepted_unix_ns < time.time_ns() + 10**9
    assert left_ns == 5 * 10**9


@pytest.mark.parametrize("set_back_s", [0, 10**6])
async def test_a_deadline_outlives_the_server_and_no_clock_lengthens_it(
    service, engine, set_back_s
):
    then_ns = time.time_ns() + set_back_s * 10**9
    times = {"accepted_unix_ns": then_ns, "deadline_unix_ns": then_ns + 500 * 10**9}
    found, asked = await former(service, **times)
    await service.resume(found, asked)
    assert 0 < engine.requests[-1].deadline_ns - engine.clock_ns <= 500 * 10**9
    service.calls.close()


async def test_a_replay_is_of_who_asked_for_it(service, engine, model):
    alice, root = Caller("alice", is_operator=False), Caller("root")
    async with await service.begin(call(), Accepting(alice, b"")) as generation:
        engine.finish(FinishReason.LENGTH)
        await read_to_end(generation, Received())
    known = service.find("r", root, or_operator=True)
    async with await service.replay(known, Accepting(root, b""), call()) as generation:
        service.find(generation.call.call_id, root)
        with pytest.raises(PermissionDeniedError):
            service.find(generation.call.call_id, alice)
