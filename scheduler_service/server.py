"""The servicer of slotwise.v1.Inference: each RPC in a few lines over the service."""
# ruff: noqa: N802  methods bear the names of their RPCs

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc

from . import messages
from .auth import Callers
from .calls import Call, Generation
from .engine_types import EngineConfig
from .errors import InvalidArgumentError, SlotwiseError, SlowReaderError
from .journal import RecordedCall
from .logs import about
from .metrics import Metrics
from .service import Accepting, InferenceService
from .status import CallContext, to_status
from .validation import check_request_id

if TYPE_CHECKING:
    # OpenTelemetry is optional.
    from .tracing import Tracer

T = TypeVar("T")

log = logging.getLogger(__name__)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Turns messages into calls of the service, and its errors into statuses."""

    def __init__(
        self,
        service: InferenceService,
        config: EngineConfig,
        callers: Callers,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """metrics None: of its own; tracer None: nothing is traced."""
        self._service = service
        self._metrics = metrics or Metrics()
        self._metrics.follow(service)
        self._config = config
        self._callers = callers
        self._tracer = tracer
        self._started_ns = service.engine.now_ns()

    async def Generate(self, request: pb.GenerateRequest, context: CallContext) -> None:
        await self._answer(context, self._generate(request, context))

    async def Attach(self, request: pb.AttachRequest, context: CallContext) -> None:
        await self._answer(context, self._attach(request, context))

    async def Replay(self, request: pb.ReplayRequest, context: CallContext) -> None:
        await self._answer(context, self._replay(request, context))

    async def Complete(
        self, request: pb.GenerateRequest, context: CallContext
    ) -> pb.CompleteResponse:
        return await self._answer(context, self._complete(request, context))

    async def Cancel(self, request: pb.CancelRequest, context: CallContext) -> pb.CancelResponse:
        return await self._answer(context, self._cancel(request, context))

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: CallContext
    ) -> pb.TokenizeResponse:
        return await self._answer(context, self._tokenize(request))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: CallContext
    ) -> pb.DetokenizeResponse:
        return await self._answer(context, self._detokenize(request))

    async def RenderChat(
        self, request: pb.RenderChatRequest, context: CallContext
    ) -> pb.RenderChatResponse:
        return await self._answer(context, self._render_chat(request))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: CallContext
    ) -> pb.GetModelInfoResponse:
        return await self._answer(context, self._model_info())

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: CallContext
    ) -> pb.GetServerInfoResponse:
        return await self._answer(context, self._server_info())

    async def GetLoad(self, request: pb.GetLoadRequest, context: CallContext) -> pb.GetLoadResponse:
        return await self._answer(context, self._load())

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: CallContext
    ) -> pb.GetMetricsResponse:
        return await self._answer(context, self._text_of_metrics())

    async def ListSlots(
        self, request: pb.ListSlotsRequest, context: CallContext
    ) -> pb.ListSlotsResponse:
        return await self._answer(context, self._slots())

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: CallContext
    ) -> pb.FlushCacheResponse:
        return await self._answer(context, self._flush_cache(request))

    async def _generate(self, request: pb.GenerateRequest, context: CallContext) -> None:
        async with await self._begin(request, context) as generation:
            # Workers first: in one turn of the event loop a command is planned, in the next sent.
            for _ in range(2):
                await asyncio.sleep(0)
            await self._tell(generation, context)

    async def _attach(self, request: pb.AttachRequest, context: CallContext) -> None:
        messages.refuse_unknown_fields(request)
        check_request_id(request.request_id)
        known = self._service.find(request.request_id, self._callers.of(context))
        call = messages.recorded_call(known.record)
        generation = self._service.attach(known, call, messages.places(request))
        async with generation:
            with self._attached(known, context):
                await self._tell(generation, context)

    def _attached(
        self, known: Call, context: CallContext
    ) -> contextlib.AbstractContextManager[None]:
        if self._tracer is None:
            return contextlib.nullcontext()
        metadata = context.invocation_metadata() or ()
        return self._tracer.attached(metadata, known.call_id, known.trace)

    async def _replay(self, request: pb.ReplayRequest, context: CallContext) -> None:
        messages.refuse_unknown_fields(request)
        check_request_id(request.request_id)
        accepting = self._accepting(b"", context)
        known = self._service.find(request.request_id, accepting.caller, or_operator=True)
        call = messages.recorded_call(known.record)
        with self._service.rejections.counted():
            generation = await self._service.replay(known, accepting, call)
        async with generation:
            record = messages.request_record(known)
            await self._write(context, pb.ReplayResponse(record=record))
            async for response in self._responses(generation):
                await self._write(context, pb.ReplayResponse(response=response))

    async def _tell(self, generation: Generation, context: CallContext) -> None:
        async for response in self._responses(generation):
            await self._write(context, response)

    async def _responses(self, generation: Generation) -> AsyncIterator[pb.GenerateResponse]:
        """The messages of a stream, as they come."""
        request_id = generation.request.call_id
        first = messages.accepted(generation, is_journaled=await generation.is_journaled())
        yield pb.GenerateResponse(request_id=request_id, accepted=first)
        while not generation.has_ended:
            for update in await generation.next():
                for response in messages.responses(update):
                    response.request_id = request_id
                    yield response

    async def _write(self, context: CallContext, message: Message) -> None:
        """SlowReaderError when the client has no room for it for too long."""
        bound_s = self._service.survival.slow_reader_s
        try:
            async with asyncio.timeout(bound_s):
                await context.write(message)
        except TimeoutError:
            self._service.num_slow_readers += 1
            raise SlowReaderError(
                f"the client has read nothing for {bound_s:g} s; read faster, or attach again and "
                "go on where you were"
            ) from None

    async def _complete(
        self, request: pb.GenerateRequest, context: CallContext
    ) -> pb.CompleteResponse:
        async with await self._begin(request, context, is_whole=True) as generation:
            first = messages.accepted(generation, is_journaled=await generation.is_journaled())
            whole = messages.WholeAnswers(generation, first)
            while not generation.has_ended:
                for update in await generation.next():
                    whole.add(update)
            return whole.response()

    async def _begin(
        self, request: pb.GenerateRequest, context: CallContext, *, is_whole: bool = False
    ) -> Generation:
        with self._service.rejections.counted(), self._refusals(request.request_id, context):
            call = messages.generate_call(request)
            accepting = self._accepting(messages.take_kept(request), context)
            return await self._service.begin(call, accepting, is_whole=is_whole)

    def _refusals(
        self, call_id: str, context: CallContext
    ) -> contextlib.AbstractContextManager[None]:
        if self._tracer is None:
            return contextlib.nullcontext()
        return self._tracer.refusals(context.invocation_metadata() or (), call_id)

    def _accepting(self, kept: bytes, context: CallContext) -> Accepting:
        remaining_s = context.time_remaining()
        deadline_ns = None
        if remaining_s is not None:
            deadline_ns = self._service.engine.now_ns() + int(remaining_s * 1e9)
        start_trace = None
        if self._tracer is not None:
            start_trace = self._tracer.caller(context.invocation_metadata() or ())
        return Accepting(self._callers.of(context), kept, deadline_ns, start_trace)

    async def _cancel(self, request: pb.CancelRequest, context: CallContext) -> pb.CancelResponse:
        messages.refuse_unknown_fields(request)
        check_request_id(request.request_id)
        self._service.cancel(request.request_id, self._callers.of(context))
        return pb.CancelResponse()

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        messages.refuse_unknown_fields(request)
        reader = self._service.model.reader
        ids = await reader.tokenize(request.text, request.parse_control_tokens)
        return pb.TokenizeResponse(token_ids=ids)

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        messages.refuse_unknown_fields(request)
        reader = self._service.model.reader
        ids = messages.token_ids(request)
        text = await reader.decode(ids, request.keep_control_tokens)
        return pb.DetokenizeResponse(text=text)

    async def _render_chat(self, request: pb.RenderChatRequest) -> pb.RenderChatResponse:
        messages.check_size(request.chat)
        messages.refuse_unknown_fields(request)
        chat = messages.chat_input(request.chat)
        text, ids = await self._service.model.reader.render_chat(chat)
        return pb.RenderChatResponse(text=text, token_ids=ids)

    async def _model_info(self) -> pb.GetModelInfoResponse:
        model = self._service.model
        return messages.model_info(
            model.info, model.output_format_name, self._service.engine.info()
        )

    async def _server_info(self) -> pb.GetServerInfoResponse:
        info = self._service.engine.info()
        return pb.GetServerInfoResponse(
            version=self._service.version,
            num_slots=info.geometry.num_slots,
            max_seq_len=info.geometry.max_seq_len,
            max_queue_len=self._config.max_queue_len,
            max_step_tokens=info.geometry.max_step_tokens,
            max_running=info.geometry.max_running,
            prefix_reuse=info.geometry.prefix_reuse.value,
            supports_batch=True,
            epoch=info.epoch,
            workers=messages.workers(info),
            uptime_ns=self._service.engine.now_ns() - self._started_ns,
            setup=messages.setup(self._service.setup()),
            retention_ms=round(self._service.survival.retention_s * 1e3),
            max_attach_window_ms=round(self._service.survival.max_window_s * 1e3),
            journal=messages.JOURNAL_STATES[self._service.survival.journal_state],
        )

    async def _load(self) -> pb.GetLoadResponse:
        uptime_ns = self._service.engine.now_ns() - self._started_ns
        return messages.load(self._service.engine.load(), self._service, uptime_ns)

    async def _text_of_metrics(self) -> pb.GetMetricsResponse:
        return pb.GetMetricsResponse(text=self._metrics.text())

    async def _flush_cache(self, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
        messages.refuse_unknown_fields(request)
        return pb.FlushCacheResponse(num_tokens=self._service.engine.flush())

    async def _slots(self) -> pb.ListSlotsResponse:
        views = self._service.engine.slots()
        return pb.ListSlotsResponse(slots=[messages.slot(view) for view in views])

    async def _answer(self, context: CallContext, work: Awaitable[T]) -> T:
        try:
            return await self._answer_or_abort(context, work)
        except grpc.aio.InternalError as error:
            # Nothing can be sent any more: the client is gone, or its deadline passed, a moment
            # before gRPC cancels the handler.
            raise asyncio.CancelledError from error

    async def _answer_or_abort(self, context: CallContext, work: Awaitable[T]) -> T:
        try:
            return await work
        except grpc.aio.InternalError:
            raise
        except SlotwiseError as error:
            code, message, metadata = to_status(error)
            # Its message may quote what was asked; and a flood of these must not fill a disk.
            log.debug("a call is refused: %s", code.name)
        except Exception:
            log.exception("a call failed by a fault of the server")
            code, metadata = grpc.StatusCode.INTERNAL, ()
            message = "a fault of the server; its log has the details"
        return await context.abort(code, message, metadata)


def add_inference(
    server: grpc.aio.Server,
    service: InferenceService,
    config: EngineConfig,
    callers: Callers | None = None,
    metrics: Metrics | None = None,
    tracer: Tracer | None = None,
) -> None:
    """Makes a server answer slotwise.v1.Inference. callers None: they are not told apart; metrics
    None: its own; tracer None: nothing is traced."""
    servicer = InferenceServicer(service, config, callers or Callers(), metrics, tracer)
    described = pb.DESCRIPTOR.services_by_name["Inference"]
    handlers = {method.name: _handler(servicer, method) for method in described.methods}
    generic = grpc.method_handlers_generic_handler(described.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


async def resume_calls(service: InferenceService, recorded: Sequence[RecordedCall]) -> None:
    """Goes on with what a former life of the server has left, then opens the service.

    recorded: in order of acceptance.
    """
    # What has ended is kept in the order in which it is to be forgotten.
    for one in sorted(recorded, key=lambda one: one.ended_unix_ns or math.inf):
        try:
            await service.resume(one, messages.recorded_call(one.record))
        except (SlotwiseError, DecodeError) as error:
            call_id = one.record.call_id
            log.warning("request %r is given up: %s", call_id, error, extra=about(call_id))
            if service.survival.journal is not None:
                service.survival.journal.forget(one.record.call_id)
    if recorded:
        log.info("%d requests go on, of %d known", service.num_resumed, len(recorded))
    service.is_open = True


def _handler(servicer: InferenceServicer, method: MethodDescriptor) -> grpc.RpcMethodHandler:
    """As the generated code makes it, but what cannot be read is the client's fault: gRPC would
    answer UNKNOWN, and log it."""
    kind, work = GetMessageClass(method.input_type), getattr(servicer, method.name)

    async def answer(data: bytes, context: CallContext) -> Any:
        try:
            request = messages.parsed(kind, data)
        except InvalidArgumentError as error:
            return await context.abort(*to_status(error))
        return await work(request, context)

    streams = method.server_streaming
    make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    return make(answer, response_serializer=GetMessageClass(method.output_type).SerializeToString)
