"""Bytes that are no message are the client's fault; gRPC would answer UNKNOWN, and log it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from .errors import InvalidArgumentError
from .status import CallContext, to_status

Find = Callable[[Any], Awaitable[grpc.RpcMethodHandler | None]]


class Readable(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped package
    """For the services whose handlers come from generated code."""

    async def intercept_service(self, find: Find, details: Any) -> grpc.RpcMethodHandler | None:
        handler = await find(details)
        return None if handler is None else readable(handler)


def readable(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """The handler, answering INVALID_ARGUMENT where its own way to read a request fails. One that
    is given the bytes as they are stays as it is."""
    if handler.request_deserializer is None:
        return handler
    parse = handler.request_deserializer
    if handler.unary_unary is not None:
        make, answer = grpc.unary_unary_rpc_method_handler, _answering(handler.unary_unary, parse)
    elif handler.unary_stream is not None:
        make, answer = grpc.unary_stream_rpc_method_handler, _answering(handler.unary_stream, parse)
    else:
        make = grpc.stream_stream_rpc_method_handler
        answer = _streaming(handler.stream_stream, parse)
    return make(answer, response_serializer=handler.response_serializer)


def _answering(work: Callable[..., Awaitable[Any]], parse: Callable[[bytes], Any]) -> Any:
    """Of one request; the answers are returned, or written to the context."""

    async def answer(data: bytes, context: CallContext) -> Any:
        return await work(await _parsed(parse, data, context), context)

    return answer


def _streaming(work: Callable[..., AsyncIterator[Any]], parse: Callable[[bytes], Any]) -> Any:
    async def answer(stream: AsyncIterator[bytes], context: CallContext) -> AsyncIterator[Any]:
        requests = (await _parsed(parse, data, context) async for data in stream)
        async for response in work(requests, context):
            yield response

    return answer


async def _parsed(parse: Callable[[bytes], Any], data: bytes, context: CallContext) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        wrong = InvalidArgumentError("request", f"the bytes sent cannot be read: {error}")
    return await context.abort(*to_status(wrong))
