"""A real gRPC server that plays a script: what the clients see without a model behind it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

SERVICE = "slotwise.v1.Inference"
WORDS = ("The", " capital", " is", " Paris", ".")
# What is blocked goes on after this: later than any test has stopped waiting for its end.
BLOCKED_S = 150


THOUGHT = pb.Delta(reasoning_text="Let me see.")
CALL_PARTS = (
    pb.Delta(tool_calls=[pb.ToolCallDelta(id="call_0", name="find", arguments_json='{"what"')]),
    pb.Delta(tool_calls=[pb.ToolCallDelta(arguments_json=': "it"}')]),
)


@dataclass
class Script(rpc.InferenceServicer):
    """Answers every prompt with WORDS; records requests; blocks or fails when told to.

    `blocked`: Generate sends Accepted and one Delta, then waits until the call ends.
    `error`: every inference call ends with this status.
    """

    blocked: bool = False
    output_format: str = ""
    error: status_pb2.Status | None = None
    requests: list = field(default_factory=list)
    # Of each call: "authorization" in its metadata.
    tokens: list = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    first_delta: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request, context):  # noqa: N802
        self._note(request, context)
        context.add_callback(self.ended.set)
        if request.n > 32:
            refusal = bad_field("n", f"{request.n} is above 32")
            context.abort_with_status(rpc_status.to_status(refusal))
        yield self._response(request, accepted=accepted())
        if request.HasField("prompt_logprobs"):
            part = pb.PromptLogprobs(first_token_index=1, logprobs=[logprobs(7)])
            yield self._response(request, prompt_logprobs=part)
        if request.parse_output:
            for delta in (THOUGHT, *CALL_PARTS):
                yield self._response(request, delta=delta)
        for i, word in enumerate(WORDS):
            for index in range(request.n or 1):
                delta = pb.Delta(index=index, first_token_index=i, token_ids=[100 + i], text=word)
                if request.HasField("logprobs"):
                    delta.logprobs.append(logprobs(100 + i, word))
                yield self._response(request, delta=delta)
            if self.blocked:
                self.first_delta.set()
                self.ended.wait(BLOCKED_S)
                return
        for index in range(request.n or 1):
            yield self._response(request, finished=finished(index))

    def Complete(self, request, context):  # noqa: N802
        self._note(request, context)
        return pb.CompleteResponse(
            accepted=accepted(),
            request_id=request.request_id or "made-1",
            choices=[whole(i) for i in range(request.n or 1)],
            prompt_logprobs=[logprobs(7)] if request.HasField("prompt_logprobs") else [],
        )

    def Cancel(self, request, context):  # noqa: N802
        self._note(request, context)
        return pb.CancelResponse()

    def Tokenize(self, request, context):  # noqa: N802
        self._note(request, context)
        return pb.TokenizeResponse(token_ids=[ord(char) for char in request.text])

    def Detokenize(self, request, context):  # noqa: N802
        self._note(request, context)
        return pb.DetokenizeResponse(text="".join(chr(i) for i in request.token_ids))

    def RenderChat(self, request, context):  # noqa: N802
        self._note(request, context)
        text = "".join(f"[{m.role}]{m.content}" for m in request.chat.messages)
        return pb.RenderChatResponse(text=text, token_ids=[1, 2])

    def GetModelInfo(self, request, context):  # noqa: N802
        self._note(request, context)
        sampling = pb.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        return pb.GetModelInfoResponse(
            name="script",
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            vocab_size=256,
            max_seq_len=64,
            max_prompt_tokens=63,
            end_token_ids=[2, 0],
            has_chat_template=True,
            default_sampling=sampling,
            fingerprint="f00",
            output_format=self.output_format,
        )

    def GetServerInfo(self, request, context):  # noqa: N802
        self._note(request, context)
        test = pb.SelfTest(name="rows", passed=True, detail="equal")
        worker = pb.WorkerInfo(
            rank=0,
            device="cpu",
            weight_dtype="float32",
            kv_dtype="float32",
            predicted_memory_bytes=1000,
            measured_memory_bytes=1010,
            self_tests=[test],
            num_threads=2,
        )
        return pb.GetServerInfoResponse(
            version="9.9",
            num_slots=8,
            max_seq_len=64,
            supports_batch=True,
            workers=[worker],
            max_running=4,
            prefix_reuse="all",
        )

    def GetLoad(self, request, context):  # noqa: N802
        self._note(request, context)
        counters = pb.RequestCounters(accepted=5, stop=4)
        cache = pb.PrefixCacheCounters(num_hits=3)
        return pb.GetLoadResponse(
            num_running=1, requests=counters, prefill_step_ns=7, prefix_cache=cache
        )

    def GetMetrics(self, request, context):  # noqa: N802
        self._note(request, context)
        return pb.GetMetricsResponse(text=b"slotwise:num_requests_running 1.0\n")

    def ListSlots(self, request, context):  # noqa: N802
        self._note(request, context)
        busy = pb.Slot(index=1, state=pb.SLOT_STATE_DECODE, request_id="a", generation=3)
        return pb.ListSlotsResponse(slots=[pb.Slot(state=pb.SLOT_STATE_FREE), busy])

    def FlushCache(self, request, context):  # noqa: N802
        self._note(request, context)
        return pb.FlushCacheResponse(num_tokens=42)

    def _note(self, request, context) -> None:
        self.requests.append(request)
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(self.error))

    def _response(self, request, **event) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=request.request_id or "made-1", **event)


def accepted() -> pb.Accepted:
    return pb.Accepted(prompt_tokens=7, seed=2**63 + 5, queue_position=0)


def logprobs(token_id: int, text: str = "x") -> pb.TokenLogprobs:
    """The token is the second of two."""
    token = pb.TokenLogprob(token_id=token_id, logprob=-1.5, rank=2, text=text.encode())
    best = pb.TokenLogprob(token_id=9, logprob=-0.25, rank=1, text=b"\xe2\x82")
    return pb.TokenLogprobs(token=token, best=[best, token])


def whole(index: int) -> pb.CompleteChoice:
    return pb.CompleteChoice(
        index=index,
        token_ids=[100 + i for i in range(len(WORDS))],
        text="".join(WORDS),
        reasoning_text="Let me see.",
        tool_calls=[pb.ToolCall(id="call_0", name="find", arguments_json="{}")],
        logprobs=[logprobs(100)],
        finished=finished(index),
    )


def finished(index: int = 0) -> pb.Finished:
    return pb.Finished(
        index=index,
        finish_reason=pb.FINISH_REASON_STOP,
        matched_token_id=2,
        usage=pb.Usage(prompt_tokens=7, completion_tokens=len(WORDS), cached_tokens=6),
        timings=pb.Timings(
            queue_ns=1,
            prefill_ns=20_000_000,
            decode_ns=80_000_000,
            time_to_first_token_ns=21_000_000,
        ),
    )


def status(code: int, message: str, *details) -> status_pb2.Status:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code, message=message, details=packed)


def bad_field(name: str, description: str) -> status_pb2.Status:
    violation = error_details_pb2.BadRequest.FieldViolation(field=name, description=description)
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    return status(code_pb2.INVALID_ARGUMENT, f"{name}: {description}", detail)


def queue_full(seconds: int, nanos: int) -> status_pb2.Status:
    delay = duration_pb2.Duration(seconds=seconds, nanos=nanos)
    detail = error_details_pb2.RetryInfo(retry_delay=delay)
    return status(code_pb2.RESOURCE_EXHAUSTED, "the queue is full (256 of 256)", detail)


@dataclass
class ScriptedServer:
    """`address` to dial, `script` to change and to read, `health` to set."""

    address: str
    script: Script
    health: health.HealthServicer


@contextlib.contextmanager
def scripted_server(
    script: Script | None = None, credentials: grpc.ServerCredentials | None = None
) -> Iterator[ScriptedServer]:
    """A server on a free port, ready at once."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    script = script or Script()
    rpc.add_InferenceServicer_to_server(script, server)
    health_servicer = health.HealthServicer()
    for name in ("", SERVICE):
        health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield ScriptedServer(f"127.0.0.1:{port}", script, health_servicer)
    finally:
        script.ended.set()
        server.stop(0).wait()
