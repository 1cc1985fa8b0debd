"""Real replicas behind the product's HAProxy: prefixes are hit, and no request is lost."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier

import pytest
from clients.gateways import make_chat_checkpoint, running_gateway
from replicas.balanced import Balancer, balanced, need_haproxy

from chaos.service import Service, check_nothing_left
from slotwise_client import Chat, Client, Delta, Finished, Message

pytestmark = pytest.mark.replicas
FLAGS = ("--tp", "1", "--threads", "1", "--num-slots", "16", "--max-running", "8")
NUM_CONVERSATIONS, NUM_TURNS = 8, 4
SYSTEM = Message("system", "Answer in a few words. " * 4)


@dataclass
class Hits:
    """Of many requests: prompt tokens, those found in a cache, and what was answered."""

    num_prompt: int = 0
    num_cached: int = 0
    answers: list[object] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.num_cached / self.num_prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    need_haproxy()
    return make_chat_checkpoint(tmp_path_factory.mktemp("tiny"))


@dataclass
class Fleet:
    """Two replicas, and the balancer before them."""

    replicas: list[Service]
    balancer: Balancer

    @property
    def address(self) -> str:
        return self.balancer.address

    def flush(self) -> None:
        for replica in self.replicas:
            with Client(replica.address) as client:
                client.flush_cache()

    def whole(self) -> None:
        """Both run, and get requests."""
        for replica in self.replicas:
            if replica.process is None or replica.process.poll() is not None:
                replica.start()
        for replica in self.replicas:
            replica.wait_ready()
        self.balancer.wait_up("replica-0", "replica-1")


@pytest.fixture(scope="module")
def running(model, tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    replicas = [Service(model, folder / name, FLAGS, journal=False) for name in ("one", "two")]
    try:
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.wait_ready()
        with balanced([one.port for one in replicas], folder) as balancer:
            yield Fleet(replicas, balancer)
        for replica in replicas:
            if replica.process is not None and replica.process.poll() is None:
                assert replica.stop() == 0, replica.last_words()
            check_nothing_left(replica)
    finally:
        for replica in replicas:
            replica.end()


@pytest.fixture
def fleet(running) -> Fleet:
    """Whole, whatever the test before has done to it, and with empty caches."""
    running.whole()
    running.flush()
    return running


def questions(number: int) -> list[str]:
    return [f"{number}. What is {turn}? " + "It matters. " * 8 for turn in range(NUM_TURNS)]


def over_grpc(address: str, key_of: Callable[[int, int], str | None]) -> Hits:
    """The conversations' turns by turns, as their users would send them."""
    hits = Hits()
    with Client(address) as client:
        chats = [[SYSTEM] for _ in range(NUM_CONVERSATIONS)]
        for turn in range(NUM_TURNS):
            for number, messages in enumerate(chats):
                messages.append(Message("user", questions(number)[turn]))
                done = client.complete(
                    Chat(list(messages)),
                    routing_key=key_of(number, turn),
                    temperature=0.0,
                    max_new_tokens=24,
                    ignore_eos=True,
                )
                (choice,) = done.choices
                messages.append(Message("assistant", "As was said."))
                hits.num_prompt += choice.finished.usage.prompt_tokens
                hits.num_cached += choice.finished.usage.cached_tokens
                hits.answers.append(choice.token_ids)
    return hits


def over_http(url: str, **fields: object) -> Hits:
    hits = Hits()
    chats = [[{"role": "system", "content": SYSTEM.content}] for _ in range(NUM_CONVERSATIONS)]
    for turn in range(NUM_TURNS):
        for number, messages in enumerate(chats):
            messages.append({"role": "user", "content": questions(number)[turn]})
            told = {"messages": messages, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            got = post(url, {**told, "return_token_ids": True, **fields})
            messages.append({"role": "assistant", "content": "As was said."})
            usage = got["usage"]
            hits.num_prompt += usage["prompt_tokens"]
            hits.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
            hits.answers.append(tuple(got["choices"][0]["token_ids"]))
    return hits


def post(url: str, body: dict[str, object]) -> dict:
    data = json.dumps({"model": "default", **body}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def alone(running) -> Hits:
    """One replica, the same conversations."""
    running.whole()
    running.flush()
    return over_grpc(running.replicas[0].address, lambda number, turn: None)


def test_conversations_find_their_prefixes(fleet, alone):
    before = fleet.balancer.num_requests()
    keyed = over_grpc(fleet.address, lambda number, turn: f"conversation {number}")
    after = fleet.balancer.num_requests()
    fleet.flush()
    scattered = over_grpc(fleet.address, lambda number, turn: f"request {number}.{turn}")
    print(f"one {alone.rate:.4f}, by key {keyed.rate:.4f}, without {scattered.rate:.4f}")
    assert keyed.answers == scattered.answers == alone.answers
    assert len(set(alone.answers)) > NUM_CONVERSATIONS
    assert all(after[name] > before[name] for name in after), "one replica did all"
    assert keyed.rate > alone.rate - 0.02
    assert scattered.rate < alone.rate - 0.08


def test_chats_of_the_gateway_find_them_without_help(fleet, alone):
    before = fleet.balancer.num_requests()
    flags = ("--balanced", "--model-alias", "default")
    with running_gateway(fleet.address, *flags) as gateway:
        hits = over_http(gateway.url)
    after = fleet.balancer.num_requests()
    print(f"one {alone.rate:.4f}, by the gateway {hits.rate:.4f}")
    assert hits.answers == alone.answers
    assert all(after[name] > before[name] + NUM_TURNS for name in after), "one replica did all"
    assert hits.rate > alone.rate - 0.02


# Long enough to run still when the replica goes.
LONG = {"temperature": 0.0, "max_new_tokens": 1500, "ignore_eos": True}


def long_answers(address: str, started: Barrier | None, rounds: int = 1) -> list[tuple[int, ...]]:
    """Of eight streams at once; all have their first token when `started` is passed."""

    def one(client: Client, number: int) -> list[tuple[int, ...]]:
        answers: list[tuple[int, ...]] = []
        for turn in range(rounds):
            ids: list[int] = []
            chat = Chat([SYSTEM, Message("user", f"{number} {turn}")])
            is_over = False
            with client.generate(chat, routing_key=f"long {number}", **LONG) as stream:
                for event in stream:
                    if isinstance(event, Delta):
                        if not ids and turn == 0 and started is not None:
                            started.wait(600)
                        ids += event.token_ids
                    is_over = is_over or isinstance(event, Finished)
            assert is_over
            answers.append(tuple(ids))
        return answers

    with Client(address) as client, ThreadPoolExecutor(8) as pool:
        done = [pool.submit(one, client, number) for number in range(8)]
        return [answer for each in done for answer in each.result()]


@pytest.fixture(scope="module")
def undisturbed(running) -> list[tuple[int, ...]]:
    running.whole()
    return long_answers(running.replicas[0].address, None, rounds=2)


@pytest.mark.parametrize("how", ["drained", "killed"])
def test_a_replica_goes_and_no_token_is_lost(fleet, undisturbed, how):
    """Drained: its streams end there. Killed: they go on at the other one, sent anew."""
    victim, started = fleet.replicas[0], Barrier(9)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(long_answers, fleet.address, started, 2)
        started.wait(600)
        assert on(victim) > 0
        if how == "drained":
            assert victim.stop() == 0, victim.last_words()
        else:
            victim._restarts = False
            victim.kill()
            victim.wait_end()
        assert answers.result() == undisturbed
    fleet.balancer.wait_up("replica-1")


def on(replica: Service) -> int:
    with Client(replica.address) as client:
        return client.load().num_running


def test_streams_of_the_gateway_survive_a_drained_replica(fleet):
    flags = ("--balanced", "--model-alias", "default")

    def ask(url: str, number: int) -> tuple[int, ...]:
        messages = [{"role": "user", "content": f"{number}"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        got = post(url, {**body, "return_token_ids": True})
        return tuple(got["choices"][0]["token_ids"])

    with running_gateway(fleet.address, *flags) as gateway, ThreadPoolExecutor(8) as pool:
        numbers = list(range(48))
        wants = list(pool.map(lambda number: ask(gateway.url, number), numbers))
        fleet.flush()
        asked = [pool.submit(ask, gateway.url, number) for number in numbers]
        asked[0].result()
        assert fleet.replicas[1].stop() == 0
        assert [one.result() for one in asked] == wants
