"""The status page's look at the server: once a second for all who look, and never for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc

from slotwise_client import (
    AsyncClient,
    Load,
    PermissionDeniedError,
    Slot,
    SlotwiseError,
    UnauthenticatedError,
    UnavailableError,
)

from .gateway import Gateway
from .status import History, Sample
from .upstream import State
from .written import dumped

# Whoever asks sooner is told the same again.
PERIOD_S: Final = 1.0
# A page that nobody can see waits for no longer.
CALL_S: Final = 2.0
# Callers with tokens of their own whose history is kept, and for how long after their last look.
MAX_WATCHES: Final = 64
KEPT_S: Final = 120.0

WORDS: Final = {
    "ready": "requests are taken",
    "starting": "the model loads; requests are refused",
    "recovering": "the workers are replaced; requests wait",
    "draining": "running requests end, new ones are refused",
    "down": "the workers did not come back yet; requests are refused",
    "unreachable": "the model's server does not answer",
}
SLOTS_NOT_TOLD: Final = (
    "The server does not list its slots to this caller: that is for operators, and can be switched "
    "off."
)

BALANCED: Final = (
    "A load balancer stands between: each look would reach another replica. Look at the gateway "
    "of one, or at their metrics."
)
# All that is known of replicas behind a load balancer: whether one of them takes requests.
_OF_REPLICAS: Final = {State.SERVING: "ready", State.NOT_SERVING: "down"}

log = logging.getLogger(__name__)


class Board:
    """What each caller may see, by its token: the server judges that, not the gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._watches: dict[str | None, Watch] = {}

    async def report(self, token: str | None) -> Report:
        """ApiError for a caller whom the server tells nothing."""
        watch = self._watch(token)
        try:
            return await watch.report()
        except UnauthenticatedError as error:
            self._watches.pop(token, None)
            raise self._gateway.upstream.error(error) from error

    def _watch(self, token: str | None) -> Watch:
        watch = self._watches.get(token)
        if watch is None:
            self._forget_old()
            watch = Watch(self._gateway, token)
            # Beyond the bound a caller is answered all the same, without a history.
            if len(self._watches) < MAX_WATCHES:
                self._watches[token] = watch
        return watch

    def _forget_old(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for token, watch in list(self._watches.items()):
            if watch.asked_at_s < now_s - KEPT_S:
                del self._watches[token]


class Report:
    """What is told at one time: as a dictionary, and as the JSON of it, written once."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.body = dumped(fields).encode()


class Watch:
    """One caller's view of the server."""

    def __init__(self, gateway: Gateway, token: str | None) -> None:
        self._gateway = gateway
        self._client: AsyncClient = gateway.upstream.client(token)
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._history = History()
        self._model: str | None = None
        self._report: Report | None = None
        self._made_at_s = 0.0
        self._lock = asyncio.Lock()
        self.asked_at_s = self._now()

    async def report(self) -> Report:
        """At most a second old. UnauthenticatedError when the server wants another token."""
        self.asked_at_s = self._now()
        async with self._lock:
            if self._report is None or self._now() >= self._made_at_s + PERIOD_S:
                started_s = self._now()
                self._report = await self._made()
                self._made_at_s = started_s
            return self._report

    async def _made(self) -> Report:
        state = await self._look()
        last = self._history.last
        is_balanced = self._gateway.config.balanced
        words = WORDS[state]
        if is_balanced and state != "ready":
            words = self._gateway.upstream.state.value
        return Report(
            {
                "state": state,
                "words": words,
                "note": BALANCED if is_balanced else None,
                "is_gateway_draining": self._gateway.is_draining,
                "model": self._model,
                "is_old": state == "unreachable" and last is not None,
                "age_s": None if last is None else round(self._now() - last.at_s, 1),
                "slots_note": SLOTS_NOT_TOLD if last is not None and last.slots is None else None,
                "facts": None if last is None else self._history.facts(),
            }
        )

    async def _look(self) -> str:
        """The server's state now. What it tells goes to the history."""
        upstream = self._gateway.upstream
        if self._gateway.config.balanced:
            return _OF_REPLICAS.get(upstream.state, "unreachable")
        if upstream.state is State.LOST:
            return "unreachable"
        started_s = self._now()
        try:
            load, slots = await asyncio.gather(
                self._client.load(timeout=CALL_S), _slots(self._client)
            )
            await self._learn_model()
        except UnauthenticatedError:
            raise
        except SlotwiseError as error:
            log.debug("no load for the status page: %s", error.message)
            return "unreachable"
        self._history.add(Sample(started_s, load, slots))
        return self._state(load)

    async def _learn_model(self) -> None:
        """A server that starts does not know it yet."""
        with contextlib.suppress(UnavailableError):
            self._model = (await self._gateway.upstream.model(self._client)).name

    def _state(self, load: Load) -> str:
        """As the server tells it; one of another release may not."""
        told = str(load.state)
        if told in WORDS:
            return told
        return "ready" if self._gateway.upstream.state is State.SERVING else "starting"


async def _slots(client: AsyncClient) -> tuple[Slot, ...] | None:
    """None where this caller may not see them."""
    try:
        return tuple(await client.slots(timeout=CALL_S))
    except PermissionDeniedError:
        return None
    except SlotwiseError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return None
