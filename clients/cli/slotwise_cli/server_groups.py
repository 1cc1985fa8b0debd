"""Rounds of a benchmark in groups, each on a server of its own, and how they end early."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from slotwise_client import SlotwiseError

from .interrupt import Ended
from .output import CliError

ServersOption = Annotated[
    int,
    typer.Option(min=1, help="Of our own, one after another; they share the rounds."),
]


@dataclass(frozen=True, slots=True)
class Group:
    """Some rounds, counted from 0 over all groups, on the server with this number."""

    server: int
    rounds: range


def groups_of(repeats: int, servers: int) -> list[Group]:
    """All rounds, as evenly as can be; no more servers than rounds."""
    servers = min(repeats, servers)
    ends = [repeats * number // servers for number in range(servers + 1)]
    return [Group(number, range(ends[number], ends[number + 1])) for number in range(servers)]


def already_running(address: str) -> Callable[[], AbstractContextManager[str]]:
    """For `measure_groups`: a server that is not ours."""
    return lambda: nullcontext(address)


def measure_groups(
    groups: list[Group],
    start: Callable[[], AbstractContextManager[str]],
    measure: Callable[[str, Group], None],
) -> BaseException | None:
    """Start a server for each group and measure there; what ended that early, if anything did.

    Signals and a server that was lost are such ends. CliError of the first group is raised: it is
    of the options.
    """
    for group in groups:
        try:
            with start() as address:
                measure(address, group)
        except (SlotwiseError, KeyboardInterrupt, Ended) as error:
            return error
        except SystemExit as error:
            # SIGTERM, as `running_server` raises it.
            return Ended(int(error.code or 0) - 128) if error.code else error
        except CliError as error:
            if group.server == 0:
                raise
            return error
    return None


def run_until_ended(work: Coroutine[Any, Any, None]) -> None:
    """asyncio.run; SIGTERM and SIGHUP cancel the work as Ctrl-C does, and raise Ended."""
    if threading.current_thread() is not threading.main_thread():
        asyncio.run(work)
        return
    signals = [
        signum
        for signum in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signum) is not signal.SIG_IGN
    ]
    before = {signum: signal.getsignal(signum) for signum in signals}
    ended: list[int] = []

    async def guarded() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(signum: int) -> None:
            ended.append(signum)
            task.cancel()

        for signum in signals:
            loop.add_signal_handler(signum, end, signum)
        await work

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        if not ended:
            raise
        raise Ended(ended[0]) from None
    finally:
        # The loop leaves the system's own handlers behind.
        for signum, handler in before.items():
            signal.signal(signum, handler)
