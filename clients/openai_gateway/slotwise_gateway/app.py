"""The application: routes, and what every response has."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slotwise_client import ModelInfo, SlotwiseError, UnauthenticatedError

from .caller import caller_token, request_id, trace_context
from .config import Config
from .errors import ApiError, model_not_found, server_error
from .fields import Route
from .gateway import Gateway
from .generation import Generation
from .metrics import CONTENT_TYPE
from .outcome import EndLog, Outcome
from .status_page import StatusPages
from .upstream import CALL_TIMEOUT_S

# In the counts: the client has left without one.
NO_RESPONSE: Final = 499

log = logging.getLogger(__name__)


def make_app(config: Config, gateway: Gateway | None = None) -> Starlette:
    """The gateway as an ASGI application. Its lifespan connects to the server."""
    gateway = gateway or Gateway(config)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await gateway.open()
        try:
            yield
        finally:
            await gateway.close()

    pages = _Pages(gateway)
    post = ["POST"]
    app = Starlette(
        routes=[
            Path("/v1/chat/completions", Generation(gateway, Route.CHAT), methods=post),
            Path("/v1/completions", Generation(gateway, Route.COMPLETIONS), methods=post),
            Path("/v1/models", pages.models),
            Path("/v1/models/{name:path}", pages.model),
            Path("/health", pages.health),
            Path("/ready", pages.ready),
            Path("/metrics", pages.metrics),
            *(StatusPages(gateway).routes() if config.status_page else ()),
        ],
        middleware=[Middleware(_Front, gateway=gateway)],
        exception_handlers={
            ApiError: _tell,
            HTTPException: _tell_http,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class _Front:
    """Names each request, puts the name on its response, counts it, and tells of its end."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._ends = EndLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = request_id(scope)
        outcome = Outcome(name)
        # Probes ask all the time.
        is_api = scope["path"].startswith("/v1/")
        tracer = self._gateway.tracer if is_api else None
        span = None if tracer is None else tracer.start(scope, name)
        scope.setdefault("state", {}).update(
            request_id=name,
            outcome=outcome,
            trace=trace_context(scope) if span is None else span.trace,
        )
        status = NO_RESPONSE

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        self._gateway.enter()
        try:
            await self._app(scope, receive, send_named)
        except Exception:
            fault = "a fault of the gateway"
            log.exception("request %s: %s", name, fault, extra={"fields": {"request_id": name}})
            outcome.error = fault
            if status != NO_RESPONSE:
                raise
            told = server_error("a fault of the gateway; its log says more")
            await _response(told)(scope, receive, send_named)
        finally:
            self._gateway.leave()
            path = getattr(scope.get("route"), "path", "other")
            self._gateway.metrics.count(path, status)
            method, ids = scope["method"], {}
            if span is not None:
                span.end(method, path, status, outcome.error)
                ids = span.ids
            level = logging.INFO if is_api else logging.DEBUG
            self._ends.tell(outcome.fields(method, path, status), ids, level)


class _Pages:
    """The routes that answer a GET."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, request: Request) -> Response:
        return Response('{"status":"ok"}', media_type="application/json")

    async def ready(self, request: Request) -> Response:
        await self._gateway.check_ready()
        return Response('{"status":"ready"}', media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        server = None
        try:
            client = self._gateway.upstream.client(caller_token(request.scope))
            server = await client.metrics(timeout=CALL_TIMEOUT_S)
        except UnauthenticatedError as error:
            raise self._gateway.upstream.error(error) from error
        except SlotwiseError as error:
            log.info("no metrics of the server: %s", error.message)
        return Response(self._gateway.metrics.text(server), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._names(await self._info(request))]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name, info = request.path_params["name"], await self._info(request)
        if name not in self._names(info):
            raise model_not_found(name, info.name)
        return _json(self._card(name))

    async def _info(self, request: Request) -> ModelInfo:
        """Asked anew: the caller may be nobody who is told."""
        await self._gateway.check_ready()
        client = self._gateway.upstream.client(caller_token(request.scope))
        try:
            return await client.model_info(timeout=CALL_TIMEOUT_S)
        except SlotwiseError as error:
            raise self._gateway.upstream.error(error) from error

    def _names(self, info: ModelInfo) -> tuple[str, ...]:
        return (info.name, *self._gateway.config.model_aliases)

    @staticmethod
    def _card(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "slotwise"}


def _json(value: object) -> Response:
    return Response(json.dumps(value, ensure_ascii=False), media_type="application/json")


async def _tell(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    outcome: Outcome = request.state.outcome
    outcome.error, outcome.param = error.message, error.param
    return _response(error)


def _response(error: ApiError) -> Response:
    return Response(
        error.body(), error.status, headers=error.headers, media_type="application/json"
    )


async def _tell_http(request: Request, error: Exception) -> Response:
    """No such path, or not by this method."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path[:200], dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # They come in any order.
        headers["Allow"] = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        message = f"{path} takes {headers['Allow']}, not {request.method}"
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no {path} here"
    else:
        message = error.detail
    told = ApiError(error.status_code, message, headers=headers)
    return await _tell(request, told)
