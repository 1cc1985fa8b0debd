"""The gRPC server as the gateway sees it: is it ready, which model does it serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from enum import Enum
from typing import Final

from slotwise_client import (
    AsyncClient,
    Health,
    ModelInfo,
    SlotwiseError,
    UnauthenticatedError,
)

from .config import Config
from .errors import ApiError, Names, from_grpc, server_error, unavailable

# After the gateway's start: how long requests wait for the first word of the server.
FIRST_ANSWER_S: Final = 2.0
# Between watches that end at once.
RETRY_S: Final = 0.2
# Of a balanced server: between questions, and for how long none may say that it is ready.
ASK_S: Final = 0.5
UNREADY_S: Final = 5.0
CALL_TIMEOUT_S: Final = 10.0
NO_NAMES: Final = Names()

log = logging.getLogger(__name__)


class State(Enum):
    """Of the server; the value is what a refused caller is told."""

    UNKNOWN = "there is no answer from the model's server yet"
    SERVING = "ready"
    NOT_SERVING = "the model is not ready: it loads, or its workers are replaced, or it drains"
    LOST = "the connection to the model's server is lost"


class Upstream:
    """One channel for all callers, and a watch on the server's health."""

    def __init__(self, config: Config, on_loss: Callable[[ApiError], None]) -> None:
        """Must be made on a running event loop. ValueError for TLS files that cannot be used.

        `on_loss` is called when new requests are served no more, with what to tell them.
        """
        self._config = config
        self._on_loss = on_loss
        self._client = AsyncClient(
            config.server,
            tls=config.tls or False,
            token=config.token,
            insecure_token=config.insecure_tokens,
        )
        self.state = State.UNKNOWN
        self._is_known = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._known_by = loop.time() + FIRST_ANSWER_S
        self._model: ModelInfo | None = None
        self._watch = asyncio.create_task(self._ask() if config.balanced else self._follow())
        self._silence = asyncio.create_task(self._tell_silence())

    async def close(self) -> None:
        """Ends the watch and the channel."""
        self._silence.cancel()
        self._watch.cancel()
        await asyncio.gather(self._watch, self._silence, return_exceptions=True)
        await self._client.close()

    def client(self, token: str | None) -> AsyncClient:
        """For a caller with this token; without one, the gateway's own goes along."""
        if token is None or not self._config.may_send_tokens:
            return self._client
        return self._client.with_token(token)

    def error(self, error: SlotwiseError, names: Names = NO_NAMES) -> ApiError:
        """What a caller is told of a failed call."""
        if isinstance(error, UnauthenticatedError) and not self._config.may_send_tokens:
            message = (
                f"{self._config.server} wants tokens, and the gateway may not pass them on: the "
                "way there is not encrypted; give it --tls-ca, or --insecure-tokens where the "
                "network is trusted"
            )
            log.error(message)
            return server_error(message)
        return from_grpc(error, names)

    async def check_ready(self) -> None:
        """ApiError unless requests are served now."""
        if self.state is State.UNKNOWN:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._known_by):
                    await self._is_known.wait()
        if self.state is not State.SERVING:
            raise unavailable(self.state.value)

    async def model(self, client: AsyncClient) -> ModelInfo:
        """What is served, as it was told since the server is ready. SlotwiseError."""
        if self._model is None:
            self._model = await client.model_info(timeout=CALL_TIMEOUT_S)
        return self._model

    async def _follow(self) -> None:
        while True:
            try:
                async for health in self._client.watch_health():
                    is_serving = health is Health.SERVING
                    self._become(State.SERVING if is_serving else State.NOT_SERVING)
            except SlotwiseError as error:
                log.info("%s: %s", self._config.server, error.message)
            self._become(State.LOST)
            await asyncio.sleep(RETRY_S)

    async def _ask(self) -> None:
        """Each question reaches a replica that the balancer thinks ready.

        One that drains is asked, and given requests, until the balancer has noticed. The client
        sends those again, so a short while of it is no loss.
        """
        clock = asyncio.get_running_loop().time
        ready_at = -UNREADY_S
        while True:
            state = await self._asked()
            if state is State.SERVING:
                ready_at = clock()
            if state is State.SERVING or clock() - ready_at >= UNREADY_S:
                self._become(state)
            await asyncio.sleep(ASK_S)

    async def _asked(self) -> State:
        try:
            health = await self._client.health(timeout=CALL_TIMEOUT_S)
        except SlotwiseError as error:
            log.debug("%s: %s", self._config.server, error.message)
            return State.LOST
        return State.SERVING if health is Health.SERVING else State.NOT_SERVING

    async def _tell_silence(self) -> None:
        """The watch has no word for a server that is not there; a call says why it is not."""
        await asyncio.sleep(FIRST_ANSWER_S)
        if self.state is not State.UNKNOWN:
            return
        try:
            await self._client.health(timeout=CALL_TIMEOUT_S)
        except SlotwiseError as error:
            log.warning("%s; it is waited for", error.message)

    def _become(self, state: State) -> None:
        if state is not self.state:
            level = logging.WARNING if state is State.LOST else logging.INFO
            log.log(level, "%s: %s", self._config.server, state.value)
        if state is not State.SERVING:
            # What comes back may be another one.
            self._model = None
            self._on_loss(unavailable(state.value))
        self.state = state
        self._is_known.set()
