"""Brings the worker group up: the first time, and again each time it was lost."""

from __future__ import annotations

import asyncio
import logging
import time

from .engine_types import EngineFailedError, EngineInfo
from .group_errors import GroupError, SetupError
from .worker_group import WorkerGroup

_log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_MAX_FIRST_TRIES = 3


class GroupStarter:
    """Knows the epoch in use and what the group reported. Each try is a new epoch."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        # Workers that outlive us have seen epochs of our former lives; the clock is above them.
        self.epoch = 0 if group.spawns else int(time.time())
        self.info: EngineInfo | None = None

    async def first_start(self) -> EngineInfo:
        """Tries until the group is up; EngineFailedError for a fault that stays.

        Workers that are not ours may come later than we do, so those are tried for ever.
        """
        num_tries = 0
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return await self._try()
            except SetupError as error:
                raise EngineFailedError(str(error)) from error
            except GroupError as error:
                num_tries += 1
                if self._group.spawns and num_tries == _MAX_FIRST_TRIES:
                    raise EngineFailedError(f"{error} (try {num_tries})") from error
                _log.warning("the workers are not up yet: %s", error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def restart(self) -> EngineInfo:
        """Tries until the group is up again, with the same geometry and weights."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return await self._try()
            except GroupError as error:
                _log.warning("the workers are not back yet: %s", error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _try(self) -> EngineInfo:
        self.epoch += 1
        info = await self._group.start(self.epoch)
        if self.info is not None and info.geometry != self.info.geometry:
            raise SetupError(
                f"the workers came back as {info.geometry}, they were {self.info.geometry}; "
                "restart the server to serve another model"
            )
        self.info = info
        return info
