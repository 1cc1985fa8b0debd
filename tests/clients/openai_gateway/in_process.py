"""A gateway in the test's own event loop, on a real port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn

from slotwise_gateway.app import make_app
from slotwise_gateway.config import Config
from slotwise_gateway.connection import connection_class
from slotwise_gateway.gateway import Gateway


@contextlib.asynccontextmanager
async def served(
    app: Any, config: Config, count: Callable[[int], None] = lambda status: None
) -> AsyncIterator[tuple[str, int]]:
    """Any application behind the gateway's own connections."""
    settings = uvicorn.Config(
        app,
        http=connection_class(config.limits, count),
        loop="none",
        ws="none",
        lifespan="on",
        log_config=None,
        port=0,
        timeout_keep_alive=config.limits.idle_s,
    )
    server = uvicorn.Server(settings)
    settings.load()
    server.lifespan = settings.lifespan_class(settings)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[:2]
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await server.shutdown()


@contextlib.asynccontextmanager
async def gateway_for(server: str, **settings: Any) -> AsyncIterator[tuple[Gateway, Any]]:
    """The gateway's parts, and the address of its port."""
    config = Config(server=server, **settings)
    gateway = Gateway(config)
    count = gateway.metrics.count_refusal
    async with served(make_app(config, gateway), config, count) as address:
        async with asyncio.timeout(30):
            await gateway.upstream._is_known.wait()
        yield gateway, address
