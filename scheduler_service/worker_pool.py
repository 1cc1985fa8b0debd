"""The worker group as one: a command goes to all ranks, a result comes from all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence

from .config import is_loopback
from .engine_types import EngineConfig, EngineInfo, Geometry, LoadProgress, WorkerConfigured
from .errors import DigestMismatchError, GroupError, SetupError, WorkerLostError
from .step import StepCommand, StepResult
from .worker_link import Credentials, WorkerLink
from .worker_messages import configure_message, step_message

_log = logging.getLogger(__name__)

# A rank may tell that it lost a peer before the peer's stream is seen to be broken.
_CAUSE_S = 0.2


def agree_on_setup(
    config: EngineConfig, epoch: int, configured: list[WorkerConfigured]
) -> EngineInfo:
    """The group's info, from what each rank (in order) reported. SetupError names a difference."""
    first = configured[0]
    for rank, answer in enumerate(configured):
        _expect(rank, "epoch", answer.epoch, epoch)
        _expect(rank, "rank", answer.report.rank, rank)
        for field in dataclasses.fields(answer.geometry):
            mine = getattr(first.geometry, field.name)
            theirs = getattr(answer.geometry, field.name)
            if mine != theirs:
                raise SetupError(
                    f"workers 0 and {rank} disagree on {field.name}: {mine!r} and {theirs!r}; "
                    "give all workers the same checkpoint and version"
                )
    _check_geometry(config, first.geometry)
    return EngineInfo(epoch, first.geometry, tuple(answer.report for answer in configured))


def _check_geometry(config: EngineConfig, geometry: Geometry) -> None:
    """SetupError unless it is what was asked for, and what a scheduler can work with."""
    _expect(0, "num_slots", geometry.num_slots, config.num_slots)
    _expect(0, "max_running", geometry.max_running, config.running_bound)
    for name in ("max_seq_len", "max_step_tokens"):
        if asked := getattr(config, name):
            _expect(0, name, getattr(geometry, name), asked)
    least = {
        "max_step_tokens": config.running_bound,
        "max_mixed_step_tokens": 1,
        "run_ahead_window_ns": 1,
        "max_logprobs_steps": 1,
    }
    for name, bound in least.items():
        value = getattr(geometry, name)
        if value < bound:
            raise SetupError(
                f"workers report {name} {value}, at least {bound} is needed; give scheduler and "
                "workers the same version"
            )


def _expect(rank: int, name: str, value: int, asked: int) -> None:
    if value != asked:
        raise SetupError(f"worker {rank} reports {name} {value}, {asked} was asked for")


class StepAgreement:
    """Joins the ranks' results: a step's result is given when all ranks have sent it, and agree."""

    def __init__(self, world_size: int, epoch: int) -> None:
        self._epoch = epoch
        self._results: list[deque[StepResult]] = [deque() for _ in range(world_size)]

    def silent_ranks(self) -> set[int]:
        """Those that others wait for; empty when all are waited for."""
        silent = {rank for rank, results in enumerate(self._results) if not results}
        return silent if len(silent) < len(self._results) else set()

    def add(self, rank: int, result: StepResult) -> StepResult | None:
        """Takes a rank's result; returns rank 0's of the oldest step once it is complete.

        DigestMismatchError when ranks differ in step id or digest. Results of older epochs are
        dropped.
        """
        if result.epoch < self._epoch:
            _log.warning("worker %d: dropped a result of old epoch %d", rank, result.epoch)
            return None
        self._results[rank].append(result)
        if not all(self._results):
            return None
        step = [results.popleft() for results in self._results]
        for other, theirs in enumerate(step):
            mine = (step[0].epoch, step[0].step_id, step[0].digest)
            if mine != (theirs.epoch, theirs.step_id, theirs.digest):
                raise DigestMismatchError(
                    f"workers 0 and {other} ran a step differently: epoch, step and digest "
                    f"{mine} and {(theirs.epoch, theirs.step_id, theirs.digest)}"
                )
        return step[0]


def check_tokens(result: StepResult, vocab_size: int) -> None:
    """WorkerLostError for a token outside the vocabulary: sent back to a rank, it would be refused
    for ever, and it has no text."""
    worst = max((max(row.token_ids, default=0) for row in result.rows), default=0)
    if worst >= vocab_size:
        raise WorkerLostError(
            0, f"sampled token id {worst} in step {result.step_id}; ids are below {vocab_size}"
        )
    logprobs = [one for row in result.rows for one in row.logprobs + row.prompt_logprobs]
    worst = max((max(one.best_token_ids, default=0) for one in logprobs), default=0)
    if worst >= vocab_size:
        raise WorkerLostError(
            0, f"named token id {worst} in step {result.step_id}; ids are below {vocab_size}"
        )


def is_local(address: str) -> bool:
    """Whether the worker at this address runs on this host."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


def warn_of_plain_links(addresses: Sequence[str]) -> None:
    """For each worker that is dialled over a network without TLS."""
    for address in addresses:
        if not is_local(address):
            _log.warning(
                "the connection to the worker at %s is plain: it can be read and changed on the "
                "way; give --workers-tls-ca, or keep the network to yourself",
                address,
            )


def choose_rendezvous(config: EngineConfig, addresses: Sequence[str]) -> str:
    """Where the ranks meet: "" for one rank, the configured address, or a free local port.

    SetupError when ranks run on other hosts and no address is configured.
    """
    if len(addresses) == 1:
        return ""
    if config.rendezvous_address:
        return config.rendezvous_address
    remote = [address for address in addresses if not is_local(address)]
    if remote:
        raise SetupError(
            f"the worker at {remote[0]} is on another host: rendezvous_address must be given, a "
            "host:port where rank 0 can listen and every rank can connect"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class WorkerPool:
    """One life of the group: `connect` once, then send and receive, until a GroupError; `close`."""

    def __init__(
        self,
        config: EngineConfig,
        addresses: Sequence[str],
        epoch: int,
        credentials: Credentials | None = None,
    ) -> None:
        """credentials None: connections over TCP are plain."""
        self._config = config
        self._epoch = epoch
        self._arrived: asyncio.Queue[tuple[int, StepResult | GroupError]] = asyncio.Queue()
        self._agreement = StepAgreement(len(addresses), epoch)
        self._error: GroupError | None = None
        # By rank; a lost one takes others with it.
        self._errors: dict[int, GroupError] = {}
        self._is_silent = False
        # Known once the ranks are configured.
        self._vocab_size = 0
        self._links = [
            WorkerLink(rank, address, self._deliver, credentials)
            for rank, address in enumerate(addresses)
        ]

    async def connect(
        self, on_progress: Callable[[LoadProgress], None], connect_timeout_s: float
    ) -> EngineInfo:
        """Configures all ranks at once. GroupError of the first rank that fails."""
        addresses = [link.address for link in self._links]
        rendezvous_address = choose_rendezvous(self._config, addresses)
        starts = [
            asyncio.create_task(
                link.configure(
                    configure_message(self._config, self._epoch, link.rank, rendezvous_address),
                    on_progress,
                    connect_timeout_s,
                    self._config.worker_timeout_s,
                )
            )
            for link in self._links
        ]
        try:
            configured = await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            ends = await asyncio.gather(*starts, return_exceptions=True)
            for rank, end in enumerate(ends):
                if isinstance(end, GroupError):
                    self._errors[rank] = end
        info = agree_on_setup(self._config, self._epoch, configured)
        self._vocab_size = info.geometry.vocab_size
        return info

    def send(self, command: StepCommand) -> None:
        """Sends a command to every rank; never waits."""
        message = step_message(command)
        for link in self._links:
            link.send(message)

    async def receive(self) -> StepResult:
        """The oldest outstanding step's result, once all ranks have sent it and agree.

        GroupError as soon as a rank is lost, also while nothing is outstanding, and ever after.
        """
        while True:
            if self._error is not None:
                raise self._error
            rank, arrived = await self._arrived.get()
            try:
                if isinstance(arrived, GroupError):
                    raise await self._cause(arrived)
                result = self._agreement.add(rank, arrived)
                if result is not None:
                    check_tokens(result, self._vocab_size)
            except GroupError as error:
                self._error = error
                raise
            if result is not None:
                return result

    def fail(self, error: GroupError) -> None:
        """Makes `receive` raise this error: someone else found the group to be lost.

        A WorkerLostError tells of silence, whichever rank it names.
        """
        self._is_silent = isinstance(error, WorkerLostError)
        self._arrived.put_nowait((0, error))

    def ranks_at_fault(self) -> dict[int, str]:
        """Ranks that cannot go on, as far as the streams tell, and why."""
        if isinstance(self._error, DigestMismatchError):
            return dict.fromkeys(range(len(self._links)), str(self._error))
        if self._is_silent:
            return dict.fromkeys(self._agreement.silent_ranks(), "the others' results are there")
        errors = [*self._errors.values(), self._error]
        return {
            error.rank: str(error)
            for error in errors
            if isinstance(error, WorkerLostError) and not error.can_go_on
        }

    async def close(self) -> None:
        """Ends all streams."""
        await asyncio.gather(*(link.close() for link in self._links))

    async def _cause(self, error: GroupError) -> GroupError:
        """The error of the rank at fault, if it comes soon after that of one that lost it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CAUSE_S):
                while isinstance(error, WorkerLostError) and error.can_go_on:
                    _, arrived = await self._arrived.get()
                    if isinstance(arrived, GroupError):
                        error = arrived
        return error

    def _deliver(self, rank: int, arrived: StepResult | GroupError) -> None:
        if isinstance(arrived, GroupError):
            self._errors[rank] = arrived
        self._arrived.put_nowait((rank, arrived))
