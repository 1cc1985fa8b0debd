"""Streams of both doors, read in a thread each; what came is compared with an undisturbed run."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

from slotwise_client import Client, Delta

QUESTION = "Write a long story about a lighthouse."
NUM_TOKENS = 160
# Of one stream, through all that is done to it.
STREAM_S = 600.0
# Enough to be in the middle.
NUM_BEFORE = 24


@dataclass
class Got:
    """What a stream has brought so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    in_middle: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def add(self, token_ids: list[int], text: str) -> None:
        self.token_ids += token_ids
        self.text += text
        if len(self.token_ids) >= NUM_BEFORE:
            self.in_middle.set()

    @property
    def answer(self) -> tuple[list[int], str, str]:
        """Its tokens, text and end."""
        return self.token_ids, self.text, self.reason


class Reader:
    """Reads in a thread; `end` waits for the end of the stream."""

    def __init__(self, read, target: str) -> None:
        self.got = Got()
        self._read = read
        self._target = target
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._read(self._target, self.got)
        except BaseException as error:
            self.got.error = error
            self.got.in_middle.set()

    def wait_middle(self) -> None:
        assert self.got.in_middle.wait(STREAM_S), self.got
        assert self.got.error is None, self.got.error
        assert len(self.got.token_ids) < NUM_TOKENS, "it was over too soon"

    def end(self) -> tuple[list[int], str, str]:
        self._thread.join(STREAM_S)
        assert not self._thread.is_alive(), self.got
        assert self.got.error is None, self.got.error
        return self.got.answer


def read_grpc(address: str, got: Got, request_id: str | None = None) -> None:
    named = {} if request_id is None else {"request_id": request_id}
    with (
        Client(address) as client,
        client.chat(
            QUESTION,
            temperature=0,
            max_new_tokens=NUM_TOKENS,
            ignore_eos=True,
            timeout=STREAM_S,
            **named,
        ) as stream,
    ):
        for event in stream:
            if isinstance(event, Delta):
                got.add(list(event.token_ids), event.text)
            elif hasattr(event, "finish_reason"):
                got.reason = str(event.finish_reason)


def read_http(url: str, got: Got) -> None:
    body = {
        "model": model_name(url),
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    for chunk in _chunks(f"{url}/v1/chat/completions", body):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            got.add(choice.get("token_ids") or [], choice["delta"].get("content") or "")
            got.reason = choice["finish_reason"] or ""


def model_name(url: str) -> str:
    return get_json(f"{url}/v1/models")["data"][0]["id"]


def get_json(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=STREAM_S) as response:
        return json.load(response)


def _chunks(url: str, body: dict) -> Iterator[dict]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=STREAM_S) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return
            if data and not data.startswith(":"):
                yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")
