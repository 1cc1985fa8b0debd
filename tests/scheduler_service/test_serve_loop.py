from __future__ import annotations

import asyncio

from scheduler_service.serve_loop import SilenceWatch


async def test_silence_is_told_once_it_lasted():
    told: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    watch = SilenceWatch(0.01, told.set_result)
    assert watch.silence_ns == 0
    watch.expect()
    async with asyncio.timeout(20):
        assert await told >= 0.01
    assert watch.silence_ns > 0
    watch.stop()
    assert watch.silence_ns == 0


async def test_what_was_heard_in_time_is_no_silence():
    told: list[float] = []
    watch = SilenceWatch(0.01, told.append)
    watch.expect()
    watch.heard(more_is_due=False)
    assert watch.silence_ns == 0
    async with asyncio.timeout(20):
        while watch._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert told == []


async def test_suspended_it_counts_but_does_not_tell():
    told: list[float] = []
    watch = SilenceWatch(0.005, told.append)
    watch.expect()
    watch.suspend()
    async with asyncio.timeout(20):
        while watch.silence_ns < 20_000_000:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert told == []
