"""Clients that read streams, go on by Attach where a connection broke, and compare every token."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from chaos.service import dial
from integration.streams import Answer, Generation
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc
from slotwise_client import Client, Delta

ATTACH_WINDOW_MS = 300_000
# Longer than any recovery: a stream that stands for so long is lost.
GIVE_UP_S = 270.0
# Of slotwise_client: where faults come without end, a stream may wait through many recoveries.
CLIENT_GIVE_UP_S = 3600.0
_RETRY_S = 0.05
_CODES_OF_A_LOST_PEER = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)
_WORDS_OF_A_LOST_PEER = (
    "RST_STREAM",
    "Stream removed",
    "Socket closed",
    "reset",
    "GOAWAY",
    # The code again, in place of words: the call ended without any.
    "CANCELLED",
)


class LostError(Exception):
    """A promise was broken: a token was lost, doubled or changed, or a stream did not come back."""


@dataclass(frozen=True)
class Want:
    """A request, and its stream when nothing disturbs it."""

    request: pb.GenerateRequest
    generation: Generation


def make_requests(rng: random.Random, count: int, num_tokens: range) -> list[pb.GenerateRequest]:
    """Greedy and seeded ones, and some of those whose rows have state of their own."""
    requests = []
    for place in range(count):
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[rng.randrange(3, 300) for _ in range(rng.randrange(1, 60))]),
            sampling=pb.SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.0]), seed=rng.randrange(1 << 64)
            ),
            max_new_tokens=rng.choice(num_tokens),
            ignore_eos=True,
        )
        match place % 8:
            case 3:
                request.n = 2
            case 4:
                request.logprobs = 2
                request.prompt_logprobs = 1
            case 5:
                request.sampling.repetition_penalty = 1.1
                request.sampling.frequency_penalty = 0.5
            case 6:
                request.regex = f"[a-z ]{{{request.max_new_tokens}}}[.]"
            case 7:
                request.ignore_eos = False
                request.stop.append("e")
        requests.append(request)
    return requests


def undisturbed(address: str, requests: Iterable[pb.GenerateRequest], threads: int) -> list[Want]:
    """Runs each once, to its end; nothing may disturb the server meanwhile."""
    # The channel ends first: so do those that hang.
    with ThreadPoolExecutor(threads) as pool, dial(address) as channel:
        stub = rpc.InferenceStub(channel)

        def run(request: pb.GenerateRequest) -> Want:
            got = Generation()
            for response in stub.Generate(request):
                got.add(response)
            got.check_ended()
            return Want(request, got)

        return list(pool.map(run, requests, timeout=10 * GIVE_UP_S))


class Progress:
    """When tokens came, over all streams."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._latest = 0.0
        self.num_tokens = 0

    def note(self, num_tokens: int) -> None:
        with self._changed:
            self._latest = time.monotonic()
            self.num_tokens += num_tokens
            self._changed.notify_all()

    def wait_next(self, timeout_s: float) -> bool:
        """Whether another token came within the timeout."""
        return self.wait_after(time.monotonic(), timeout_s) is not None

    def wait_after(self, moment: float, timeout_s: float) -> float | None:
        """The time of a token that came after this moment; None: none came within the timeout."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._latest > moment, timeout_s)
            return self._latest if came else None


@dataclass
class Tally:
    """What the readers went through; `broken` by status."""

    num_ended: int = 0
    num_reconnects: int = 0
    num_sent_anew: int = 0
    broken: Counter[str] = field(default_factory=Counter)


class Reading:
    """One request, read over as many connections as it takes."""

    def __init__(self, want: Want, request_id: str, resend: bool = False) -> None:
        self._want = want
        self._resend = resend
        self._is_journaled = False
        self.request = pb.GenerateRequest()
        self.request.CopyFrom(want.request)
        self.request.request_id = request_id
        self.request.attach_window_ms = ATTACH_WINDOW_MS
        self.got = Generation()
        # By choice, what Attach is asked for.
        self._next: dict[int, int] = {}
        self._is_sent = False
        self._is_attached = False

    def connect(self, stub: rpc.InferenceStub) -> grpc.Call:
        """Generate at first, Attach when anything was sent before."""
        self._is_attached = self._is_sent
        if not self._is_sent:
            self._is_sent = True
            self.got = Generation()
            self._next = {}
            # No deadline: it would be of the wall clock, which some faults turn.
            return stub.Generate(self.request)
        # Each connection begins with Accepted, and tells of each choice's end.
        self.got.accepted = None
        for answer in self.got.answers:
            answer.finished = None
        first, *others = (self._next.get(index, 0) for index in range(len(self.got.answers)))
        return stub.Attach(
            pb.AttachRequest(
                request_id=self.request.request_id,
                next_token_index=first,
                other_next_token_indices=others,
                next_prompt_token_index=len(self.got.prompt_logprobs) + 1,
            )
        )

    def take(self, response: pb.GenerateResponse) -> int:
        """The number of new tokens. LostError when they are not those of the undisturbed run."""
        if response.request_id != self.request.request_id:
            raise LostError(f"{self}: a message of {response.request_id!r}")
        try:
            self.got.add(response)
        except AssertionError as error:
            raise LostError(f"{self}: {error}") from error
        if response.WhichOneof("event") != "delta":
            return 0
        delta = response.delta
        wanted = self._want.generation.answers[delta.index].token_ids
        end = delta.first_token_index + len(delta.token_ids)
        # Text that was held back till the end counts as one.
        self._next[delta.index] = end if delta.token_ids else end + 1
        if list(delta.token_ids) != wanted[delta.first_token_index : end]:
            raise LostError(
                f"{self}: tokens {delta.first_token_index} to {end} of choice {delta.index} are "
                f"{list(delta.token_ids)}, not {wanted[delta.first_token_index : end]}"
            )
        return len(delta.token_ids)

    def after(self, error: grpc.RpcError) -> None:
        """A connection broke. LostError when this may not be."""
        code, words = error.code(), error.details() or ""
        is_lost_peer = code in _CODES_OF_A_LOST_PEER and any(
            word in words for word in _WORDS_OF_A_LOST_PEER
        )
        if code is grpc.StatusCode.UNAVAILABLE or is_lost_peer:
            return
        # It never came there; or it was accepted in a moment when the journal did not work.
        may_be_unknown = self._resend or not self._is_journaled
        if code is grpc.StatusCode.NOT_FOUND and self._is_attached and may_be_unknown:
            self._is_sent = False
            return
        raise LostError(f"{self}: {code.name}: {words}")

    def check(self) -> None:
        """LostError unless all is as in the undisturbed run."""
        try:
            self.got.check_ended()
            assert len(self.got.answers) == len(self._want.generation.answers), "choices"
            assert self.got.prompt_logprobs == self._want.generation.prompt_logprobs
            for got, want in zip(self.got.answers, self._want.generation.answers, strict=True):
                _check_answer(got, want)
        except AssertionError as error:
            raise LostError(f"{self}: {error}") from error

    def note_accepted(self, response: pb.GenerateResponse) -> None:
        if response.HasField("accepted"):
            self._is_journaled = response.accepted.is_journaled

    def __str__(self) -> str:
        counts = [len(answer.token_ids) for answer in self.got.answers]
        via = "Attach" if self._is_attached else "Generate"
        return f"request {self.request.request_id} ({via}, {counts} tokens so far)"


def _check_answer(got: Answer, want: Answer) -> None:
    assert got.token_ids == want.token_ids, "tokens"
    assert got.text == want.text, f"text {got.text!r}, not {want.text!r}"
    assert got.logprobs == want.logprobs, "logprobs"
    assert got.finished is not None
    assert want.finished is not None
    assert got.finished.finish_reason == want.finished.finish_reason, "finish_reason"
    assert got.finished.matched_stop_string == want.finished.matched_stop_string
    assert got.finished.usage.prompt_tokens == want.finished.usage.prompt_tokens


def client_options(request: pb.GenerateRequest) -> tuple[list[int], dict[str, Any]]:
    """The same request as arguments of slotwise_client."""
    parts = {field.name: value for field, value in request.ListFields()}
    prompt = list(parts.pop("token_ids").ids)
    sampling = parts.pop("sampling")
    parts |= {field.name: value for field, value in sampling.ListFields()}
    lists = {"stop": list(parts["stop"])} if "stop" in parts else {}
    return prompt, parts | lists


class Readers:
    """Threads that read one request after another, each on a connection of its own."""

    def __init__(
        self,
        address: str,
        wants: Sequence[Want],
        count: int,
        seed: int,
        resend: bool = False,
        num_by_client: int = 0,
    ) -> None:
        """resend: a request that the server does not know any more is sent anew. num_by_client: so
        many of the threads read by slotwise_client, which reconnects in its own way."""
        self.progress = Progress()
        self.tally = Tally()
        # What was promised and not held.
        self.faults: list[str] = []
        self._address = address
        self._wants = wants
        self._resend = resend
        self._stop = threading.Event()
        self._is_abandoned = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(random.Random(f"{seed} {place}"), place < num_by_client),
                daemon=True,
            )
            for place in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def abandon(self) -> None:
        """The requests of now are given up as soon as their connections break."""
        self._is_abandoned = True
        self._stop.set()

    def stop(self) -> None:
        """The requests of now are read to their ends."""
        self._stop.set()
        for thread in self._threads:
            thread.join(GIVE_UP_S + 20)
            assert not thread.is_alive(), "a reader hangs"

    def read(self, channel: grpc.Channel, want: Want) -> None:
        """Reads one request; LostError."""
        stub = rpc.InferenceStub(channel)
        reading = Reading(want, uuid.uuid4().hex, self._resend)
        moved = time.monotonic()
        while True:
            try:
                for response in reading.connect(stub):
                    reading.note_accepted(response)
                    self.progress.note(reading.take(response))
                    moved = time.monotonic()
                reading.check()
                with self._lock:
                    self.tally.num_ended += 1
                return
            except grpc.RpcError as error:
                if self._is_abandoned:
                    return
                reading.after(error)
                with self._lock:
                    self.tally.broken[f"{error.code().name}: {error.details()}"[:160]] += 1
                    self.tally.num_reconnects += 1
                if time.monotonic() - moved > GIVE_UP_S:
                    raise LostError(
                        f"{reading}: nothing for {GIVE_UP_S} s: {error.details()}"
                    ) from error
            time.sleep(_RETRY_S)

    def read_by_client(self, client: Client, want: Want) -> None:
        """The same by slotwise_client, which goes on by itself where a connection broke."""
        got = [("", list[int]()) for _ in want.generation.answers]
        prompt, options = client_options(want.request)
        for event in client.generate(prompt, **options):
            if isinstance(event, Delta):
                text, token_ids = got[event.index]
                if event.token_ids and event.first_token_index != len(token_ids):
                    raise LostError(f"client: a gap or an overlap at {event.first_token_index}")
                got[event.index] = (text + event.text, [*token_ids, *event.token_ids])
                self.progress.note(len(event.token_ids))
        wanted = [(answer.text, answer.token_ids) for answer in want.generation.answers]
        if got != wanted:
            raise LostError(f"client: {got}, not {wanted}")
        with self._lock:
            self.tally.num_ended += 1

    def _run(self, rng: random.Random, by_client: bool) -> None:
        client = Client(self._address, reconnect_timeout=CLIENT_GIVE_UP_S)
        with dial(self._address) as channel, client:
            while not self._stop.is_set():
                want = rng.choice(self._wants)
                try:
                    if by_client:
                        self.read_by_client(client, want)
                    else:
                        self.read(channel, want)
                except Exception as error:  # of any kind: the main thread tells of it
                    with self._lock:
                        self.faults.append(f"{type(error).__name__}: {error}")
