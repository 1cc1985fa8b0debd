"""A server of the public API that loses connections, requests and itself, as a test says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
from clients.scripted_server import (
    BLOCKED_S,
    Script,
    ScriptedServer,
    bad_field,
    finished,
    logprobs,
    scripted_server,
    status,
)
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from slotwise.v1 import inference_pb2 as pb

NUM_TOKENS = 6
# Of the text, what is held back until the end.
TAIL = "!"


def refusal(code: int, reason: str, message: str) -> status_pb2.Status:
    """A status as the server makes it: with details."""
    return status(code, message, error_details_pb2.ErrorInfo(reason=reason, domain="slotwise.v1"))


DRAINS = refusal(code_pb2.UNAVAILABLE, "UNAVAILABLE", "the server drains")
NOT_FOUND = refusal(code_pb2.NOT_FOUND, "UNKNOWN_REQUEST", "no request of that id is known")
EXPIRED = refusal(code_pb2.FAILED_PRECONDITION, "EXPIRED_REQUEST", "it ended too long ago")
OUT_OF_RANGE = refusal(code_pb2.OUT_OF_RANGE, "OUT_OF_RANGE", "it has not as many tokens")
SLOW = refusal(code_pb2.ABORTED, "SLOW_READER", "the client has read nothing for 60 s")
SUPERSEDED = refusal(code_pb2.ABORTED, "SUPERSEDED", "another connection reads the request now")
POISON = refusal(code_pb2.INTERNAL, "CORRUPTED", "the workers died of it twice")
EXISTS = refusal(code_pb2.ALREADY_EXISTS, "DUPLICATE_REQUEST", "a request of that id runs")
LOST = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="Socket closed")
RESET = status_pb2.Status(code=code_pb2.INTERNAL, message="Received RST_STREAM with error code 2")
FAULT = status_pb2.Status(code=code_pb2.INTERNAL, message="a fault of the server")


@dataclass(frozen=True)
class Fault:
    """A stream ends so after some of its messages. No status: its connection breaks; with
    is_silent it ends OK. The server then knows no request any more, or makes other tokens."""

    after: int = 0
    status: status_pb2.Status | None = None
    forgets: bool = False
    is_silent: bool = False
    shift: int = 0
    # The request was cancelled there.
    cancels: bool = False


@dataclass
class LossyScript(Script):
    """Every request gets the same tokens and text, however it is read; `calls` tells what came.

    `faults`: one for each stream in turn, None: it goes well. `shift` makes other tokens.
    """

    faults: deque[Fault | None] = field(default_factory=deque)
    shift: int = 0
    max_window_ms: int = 300_000
    # How a replayed request differs from what was recorded of it.
    replayed: dict = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    was_cancelled: threading.Event = field(default_factory=threading.Event)
    completes: threading.Event = field(default_factory=threading.Event)
    break_connections: list = field(default_factory=list)
    _known: dict = field(default_factory=dict)

    def Generate(self, request, context):  # noqa: N802
        self._note(request, context)
        self.calls.append("Generate")
        if request.attach_window_ms > self.max_window_ms:
            self._refuse(context, bad_field("attach_window_ms", "0 is the most that it may be"))
        self._fail_at_once(request, context)
        if request.request_id in self._known:
            self._refuse(context, EXISTS)
        first = pb.Accepted(prompt_tokens=7, seed=request.sampling.seed)
        self._known[request.request_id] = (request, first)
        yield from self._stream(request, first, [0] * max(request.n, 1), 0, context, joined=1)

    def Attach(self, request, context):  # noqa: N802
        self._note(request, context)
        indices = [request.next_token_index, *request.other_next_token_indices]
        self.calls.append(f"Attach {' '.join(map(str, indices))}")
        self._fail_at_once(request, context)
        if request.request_id not in self._known:
            self._refuse(context, NOT_FOUND)
        of, first = self._known[request.request_id]
        begins = (indices + [0] * 32)[: max(of.n, 1)]
        yield from self._stream(
            of, first, begins, request.next_prompt_token_index, context, joined=2
        )

    def Complete(self, request, context):  # noqa: N802
        self.calls.append("Complete")
        self.completes.set()
        self.requests.append(request)
        fault = self.faults.popleft() if self.faults else None
        self._known[request.request_id] = (request, pb.Accepted(seed=request.sampling.seed))
        if fault is None:
            return super().Complete(request, context)
        self._fail(fault, request, context)
        return None

    def Cancel(self, request, context):  # noqa: N802
        self.cancelled.append(request.request_id)
        self.was_cancelled.set()
        return pb.CancelResponse()

    def Replay(self, request, context):  # noqa: N802
        self._note(request, context)
        change = {"recorded": NUM_TOKENS, "end": pb.FINISH_REASON_STOP, "shift": 0, **self.replayed}
        of = pb.GenerateRequest(request_id=request.request_id, text="x", max_new_tokens=NUM_TOKENS)
        ids = [one.token_ids[0] for one in self._parts(of, 0) if one.token_ids]
        answer = pb.RecordedAnswer(token_ids=ids[: change["recorded"]], finish_reason=change["end"])
        record = pb.RequestRecord(
            request_id=request.request_id,
            request=of,
            prompt_token_ids=[3, 4],
            seed=2**63 + 5,
            setup=pb.Setup(fingerprint="f00", device_name="cpu", world_size=1),
            answers=[answer],
            accepted_unix_ns=1_700_000_000_000_000_000,
        )
        yield pb.ReplayResponse(record=record)
        of.request_id = "replay-1"
        self.shift = change["shift"]
        for response in self._stream(of, pb.Accepted(seed=9), [0], 0, context, joined=2):
            yield pb.ReplayResponse(response=response)
        self.shift = 0

    def forget(self) -> None:
        """What a server without a journal does when it starts again."""
        self._known.clear()

    def _stream(self, request, first, begins, prompt_begin, context, joined):
        fault = self.faults.popleft() if self.faults else None
        messages = self._messages(request, first, begins, prompt_begin, joined)
        for i, message in enumerate(messages):
            if fault is not None and i == fault.after:
                break
            yield pb.GenerateResponse(request_id=request.request_id, **message)
            if self.blocked and "delta" in message:
                self.first_delta.set()
                self.ended.wait(BLOCKED_S)
        if fault is not None and fault.cancels:
            for index in range(len(begins)):
                end = pb.Finished(index=index, finish_reason=pb.FINISH_REASON_CANCELLED)
                yield pb.GenerateResponse(request_id=request.request_id, finished=end)
            self.forget()
        elif fault is not None:
            self._fail(fault, request, context)

    def _fail_at_once(self, request, context) -> None:
        """Before anything is known of the request."""
        if self.faults and self.faults[0] is not None and not self.faults[0].after:
            self._fail(self.faults.popleft(), request, context)

    def _fail(self, fault, request, context) -> None:
        if fault.forgets:
            self.forget()
        self.shift += fault.shift
        if fault.status is not None:
            self._refuse(context, fault.status)
        if fault.is_silent:
            return
        gone = threading.Event()
        context.add_callback(gone.set)
        for break_connection in self.break_connections:
            break_connection()
        gone.wait(BLOCKED_S)

    def _messages(self, request, first, begins, prompt_begin, joined) -> Iterator[dict]:
        yield {"accepted": first}
        if request.HasField("prompt_logprobs"):
            for i in range(max(1, prompt_begin), 4):
                part = pb.PromptLogprobs(first_token_index=i, logprobs=[logprobs(i)])
                yield {"prompt_logprobs": part}
        for index, begin in enumerate(begins):
            parts = self._parts(request, index)[begin:]
            while parts:
                size = joined if parts[0].token_ids and len(parts) > joined else 1
                taken, parts = parts[:size], parts[size:]
                delta = pb.Delta(index=index, first_token_index=taken[0].first_token_index)
                for part in taken:
                    text = delta.text + part.text
                    reasoning = delta.reasoning_text + part.reasoning_text
                    delta.MergeFrom(part)
                    delta.text, delta.reasoning_text = text, reasoning
                delta.first_token_index = taken[0].first_token_index
                yield {"delta": delta}
            yield {"finished": finished(index)}

    def _parts(self, request, index: int) -> list[pb.Delta]:
        """A delta for each token, the second without text, then one for what was held back."""
        parts = []
        for i in range(NUM_TOKENS):
            token_id = 100 * (index + 1) + i + (self.shift if i >= 2 else 0)
            text = "" if i == 1 else f" {token_id}"
            part = pb.Delta(index=index, first_token_index=i, token_ids=[token_id], text=text)
            if request.HasField("logprobs"):
                part.logprobs.append(logprobs(token_id))
            if request.parse_output and i in (2, 3):
                part.text = ""
                part.reasoning_text = f"r{i}"
            if request.parse_output and i == 4:
                call = pb.ToolCallDelta(id=f"call_{id(part)}", name="find", arguments_json="{")
                part.tool_calls.append(call)
            if request.parse_output and i == 5:
                part.tool_calls.append(pb.ToolCallDelta(arguments_json='"a"'))
            parts.append(part)
        tail = pb.Delta(index=index, first_token_index=NUM_TOKENS, text=TAIL)
        if request.parse_output:
            tail.tool_calls.append(pb.ToolCallDelta(arguments_json=": 1}"))
        return [*parts, tail]

    @staticmethod
    def _refuse(context, wanted: status_pb2.Status) -> None:
        if wanted.details:
            context.abort_with_status(rpc_status.to_status(wanted))
        codes = {code.value[0]: code for code in grpc.StatusCode}
        context.abort(codes[wanted.code], wanted.message)


class Proxy:
    """A port in front of a server, whose connections can be broken and which can be shut.

    cut_after: the first connections, MAX_CUTS of them, break by themselves when they have brought
    so many bytes of the server's, however fast either side is. `num_cuts` counts these. Not all do:
    a message that is longer would never come.
    """

    MAX_CUTS = 4

    def __init__(self, upstream: str, cut_after: int | None = None) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._cut_after = cut_after
        self.num_cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._upstream)
            except OSError:  # the server ends
                near.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            cut_after = self._cut_after if self.num_cuts < self.MAX_CUTS else None
            for way in ((near, far, None), (far, near, cut_after)):
                threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        try:
            while data := source.recv(1 << 16 if left is None else left):
                target.sendall(data)
                if left is not None:
                    left -= len(data)
                    self.num_cuts += not left
        except OSError:
            pass
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def lossy_server() -> Iterator[ScriptedServer]:
    """`address` leads through a proxy, which breaks its connections when the script says so."""
    script = LossyScript()
    with scripted_server(script) as server:
        proxy = Proxy(server.address)
        script.break_connections.append(proxy.cut)
        try:
            yield ScriptedServer(proxy.address, script, server.health)
        finally:
            script.ended.set()
            proxy.close()
