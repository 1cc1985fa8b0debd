"""The Python client against real servers that are lost and come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import fixed_port

from chaos.service import poll
from checkpoints import make_checkpoint
from integration.servers import Server, running_server
from slotwise_client import AsyncClient, Client, Delta, Finished, FinishReason

TIMEOUT_S = 600
# Enough that no server is through before a signal sent after the first tokens, be it a second late.
TOKENS = 3000
OPTIONS = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_new_tokens": TOKENS}
FLAGS = ("--max-seq-len", "4096", "--num-slots", "4")
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)
    return folder


class Replaced:
    """A server on a fixed port whose process is ended by a signal and started again."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._port = fixed_port()
        self._model, self._flags = model, flags
        self._stack = contextlib.ExitStack()
        self.server = self._start()

    def replace(self, signum: int) -> None:
        os.kill(self.server.process.pid, signum)
        self.server.process.wait(TIMEOUT_S)
        self._stack.close()
        self.server = self._start()

    def close(self) -> None:
        self._stack.close()

    def _start(self) -> Server:
        running = running_server(self._model, *self._flags, port=self._port)
        return self._stack.enter_context(running)


@pytest.fixture
def replaced(tiny_model) -> Iterator[Callable[..., Replaced]]:
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> Replaced:
            made = Replaced(tiny_model, *FLAGS, *flags)
            stack.callback(made.close)
            return made

        yield start


def text_and_ids(events) -> tuple[str, list[int]]:
    deltas = [event for event in events if isinstance(event, Delta)]
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason is FinishReason.LENGTH
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return "".join(delta.text for delta in deltas), ids


@pytest.mark.parametrize("journalled", [True, False])
def test_a_killed_scheduler_is_not_seen(replaced, tmp_path, journalled):
    """With a journal the request goes on; without one it is asked for anew, and compared."""
    made = replaced(*(("--journal", str(tmp_path / "journal")) if journalled else ()))
    with Client(made.server.address, reconnect_timeout=TIMEOUT_S) as client:
        want = text_and_ids(list(client.generate(PROMPT, timeout=TIMEOUT_S, **OPTIONS)))
        assert len(want[1]) == TOKENS
        stream = client.generate(PROMPT, timeout=TIMEOUT_S, **OPTIONS)
        events = []
        for event in stream:
            events.append(event)
            if isinstance(event, Delta) and event.first_token_index >= 20:
                break
        killer = threading.Thread(target=made.replace, args=(signal.SIGKILL,))
        killer.start()
        events += stream
        killer.join()
        assert text_and_ids(events) == want
        load = client.load()
        # Of the second server: it went on, or was asked for anew.
        assert (load.num_resumed, load.requests.accepted) == (journalled, 1)
        assert load.num_unread == 0


def test_a_drained_server_is_not_seen(replaced):
    """It gives the answers no grace: they are asked for anew of the next one."""
    made = replaced("--grace", "0")

    async def run() -> None:
        async with AsyncClient(made.server.address, reconnect_timeout=TIMEOUT_S) as client:
            want = await client.complete(PROMPT, timeout=TIMEOUT_S, **OPTIONS)
            asked = [client.complete(PROMPT, timeout=TIMEOUT_S, **OPTIONS) for _ in range(2)]
            answers = asyncio.gather(*asked)
            stream = client.generate(PROMPT, timeout=TIMEOUT_S, **OPTIONS)
            events = [await anext(stream), await anext(stream)]
            await asyncio.to_thread(made.replace, signal.SIGTERM)
            for answer in await answers:
                assert (answer.token_ids, answer.text) == (want.token_ids, want.text)
            events += [event async for event in stream]
            assert text_and_ids(events) == (want.text, list(want.token_ids))
            assert (await client.load()).requests.accepted == 3

    asyncio.run(run())


def test_a_stream_that_is_left_frees_its_slot(tiny_model):
    with running_server(tiny_model, *FLAGS) as server, Client(server.address) as client:
        with client.generate(PROMPT, **OPTIONS) as stream:
            next(stream)
        poll(lambda: client.load().requests.cancelled == 1, TIMEOUT_S, "it is cancelled")
        assert client.load().num_running == 0
