"""Spawns the worker processes of this host, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .errors import GroupError, SetupError, WorkerLostError

_log = logging.getLogger(__name__)
_worker_log = logging.getLogger("slotwise.worker")

_MAX_LINE_BYTES = 1024 * 1024
_NUM_LAST_LINES = 20
_END_GRACE_S = 3.0
# As `python -m worker --exit-with-parent` takes it. SIGTERM and SIGINT may be sent to all processes
# of a service at once, and we drain first.
_END_SIGNAL = signal.SIGUSR1
# Of a worker that cannot free itself: another process can.
_EXIT_STUCK = 75
# For the workers, unless set. Programs with NVLink multicast have put all GPUs of a host out of
# service for a day; the sums between ranks do without.
_WORKER_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# A line that a worker logged: the time (ours is the same), the level, the rest.
_LOG_LINE = re.compile(r"\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
# What such a line as JSON tells besides.
_WORKER_FIELDS = ("rank", "epoch")

_FOLDER_PREFIX = "slotwise-"
_SOCKET_NAME = re.compile(r"worker-\d+\.sock")

_PROGRAM = (sys.executable, "-m", "worker")
# In place of a rank.
_STANDBY = -1

# How `python -m worker` begins to say why it cannot start.
_REFUSAL = "worker: "

# The command line of one rank: (rank, address) -> arguments.
Command = Callable[[int, str], Sequence[str]]


class WorkerExitError(SetupError):
    """A worker process ended by itself; the message has its last words."""


def worker_command(model_dir: str, world_size: int, num_threads: int, device: str) -> Command:
    """`python -m worker` of this interpreter. num_threads 0: cores // world_size, at least 1.

    device "cuda": rank r is given the r-th of the visible GPUs; "auto": it is told nothing.
    """
    threads = num_threads or max(1, (os.cpu_count() or 1) // world_size)

    def command(rank: int, address: str) -> Sequence[str]:
        devices = {"auto": [], "cpu": ["--device", "cpu"], "cuda": ["--device", f"cuda:{rank}"]}
        return [
            *_PROGRAM,
            *("--listen", address),
            *("--model", model_dir),
            *("--threads", str(threads)),
            *("--log-format", "json"),
            *devices[device],
            # By our id: the imports of a worker take seconds, and we may be gone by then.
            *("--exit-with-parent", str(os.getpid())),
        ]

    return command


def standby_command() -> Sequence[str]:
    """A worker that loads its libraries and waits on standard input for the words of
    `worker_command` behind the program."""
    return [*_PROGRAM, "--standby", "--exit-with-parent", str(os.getpid())]


@dataclass(frozen=True, slots=True)
class _Said:
    """A line of a worker's output. `level` None: it is no log line. `lines`: itself, and those of
    its traceback."""

    lines: Sequence[str]
    level: int | None = None
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def words(self) -> Sequence[str]:
        """For the message of a lost worker; a logger's name is not to begin a line as _REFUSAL."""
        if self.level is None:
            return self.lines
        return [f"{logging.getLevelName(self.level)} {self.lines[0]}", *self.lines[1:]]


def _read(text: str) -> _Said:
    """A log line as JSON or as text, or something that a library has said."""
    levels = logging.getLevelNamesMapping()
    if match := _LOG_LINE.fullmatch(text):
        return _Said([match[2]], levels[match[1]])
    try:
        values = json.loads(text) if text.startswith("{") else {}
        level = levels[values["level"].upper()]
        first = f"{values['logger']}: {values['message']}"
        traceback = values.get("exception", "").splitlines()
    except (ValueError, KeyError, AttributeError):
        return _Said([text])
    fields = {name: values[name] for name in _WORKER_FIELDS if name in values}
    return _Said([first, *traceback], level, fields)


class _WorkerProcess:
    """One spawned rank: its output goes to our log, line by line and at its own level."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process) -> None:
        """rank: _STANDBY until it is told another."""
        self.rank = rank
        self._process = process
        self._is_ending = False
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._output = asyncio.create_task(self._forward_output(), name=f"worker {rank} output")

    @property
    def _name(self) -> str:
        return "standby worker" if self.rank == _STANDBY else f"worker {self.rank}"

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def tell(self, rank: int, words: Sequence[str]) -> bool:
        """Makes a standby a rank, by its command line; whether it took it."""
        assert self._process.stdin is not None
        if self.has_ended:
            return False
        self.rank = rank
        try:
            self._process.stdin.write(json.dumps(list(words)).encode() + b"\n")
            await self._process.stdin.drain()
            self._process.stdin.close()
        except (OSError, RuntimeError):
            # It ends just now; uvloop has an error of its own for a pipe that is closed.
            return False
        return not self.has_ended

    async def wait(self) -> GroupError:
        """Waits until the process has ended. WorkerExitError: another would end likewise."""
        code = await self._process.wait()
        await self._output
        lines = list(self._last_lines)
        refusal = next((i for i, line in enumerate(lines) if line.startswith(_REFUSAL)), None)
        if refusal is not None:
            words = "\n".join(lines[refusal:]).removeprefix(_REFUSAL)
            return WorkerExitError(f"worker {self.rank}: {words}")
        words = "\n".join(lines) or "it said nothing"
        if code < 0 or code == _EXIT_STUCK:
            return WorkerLostError(self.rank, f"{_ended_by(code)}: {words}")
        return WorkerExitError(f"worker {self.rank} {_ended_by(code)}: {words}")

    async def end(self, grace_s: float) -> None:
        """Ends the process: _END_SIGNAL and grace_s to react (0: none), then SIGKILL."""
        self._is_ending = True
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            if grace_s and self._process.returncode is None:
                self._process.send_signal(_END_SIGNAL)
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        self._output.cancel()
        await asyncio.gather(self._output, return_exceptions=True)

    async def _forward_output(self) -> None:
        assert self._process.stdout is not None
        level = logging.INFO
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                _log.warning("worker %d: dropped a line over %d bytes", self.rank, _MAX_LINE_BYTES)
                continue
            if not line:
                break
            said = _read(line.decode(errors="replace").rstrip())
            self._last_lines.extend(said.words)
            # Lines without a level, as those of a library, belong to the one before.
            level = level if said.level is None else said.level
            fields = {"rank": self.rank, **said.fields} if self.rank != _STANDBY else said.fields
            for text in said.lines:
                _worker_log.log(level, "%s: %s", self._name, text, extra={"fields": fields})
        code = await self._process.wait()
        if not self._is_ending:
            _log.error("%s: %s", self._name, _ended_by(code))


def _ended_by(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


class _SocketFolder:
    """A folder of sockets that nobody else may enter; locked while its owner lives."""

    def __init__(self) -> None:
        # It gets the name that others look for when it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{_FOLDER_PREFIX}"))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left_folders() -> None:
    """Removes the folders of this user's services that were killed: nobody locks them, and nothing
    but sockets of workers is in them."""
    for folder in Path(tempfile.gettempdir()).glob(_FOLDER_PREFIX + 8 * "?"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            names = os.listdir(lock)
            is_ours = os.fstat(lock).st_uid == os.geteuid()
            if is_ours and all(_SOCKET_NAME.fullmatch(name) for name in names):
                _log.info("removed %s: the service that left it was killed", folder)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


class Supervisor:
    """The worker processes of one group, on unix sockets in a folder of their own."""

    def __init__(
        self, world_size: int, command: Command, standby: Sequence[str] | None = None
    ) -> None:
        """`standby`: the command line of a process that waits to become a rank, with the words of
        `command` behind the program."""
        self._world_size = world_size
        self._command = command
        self._standby = standby
        self._waiting: list[_WorkerProcess] = []
        self._folder: _SocketFolder | None = None
        # By rank.
        self._processes: dict[int, _WorkerProcess] = {}

    def listening(self) -> dict[int, str]:
        """Addresses of the processes that live and have begun to listen, by rank."""
        return {
            rank: f"unix:{self._socket(rank)}"
            for rank, process in self._processes.items()
            if not process.has_ended and self._socket(rank).exists()
        }

    async def spawn(self, lost: Mapping[int, str] = MappingProxyType({})) -> tuple[str, ...]:
        """Starts the ranks that do not run, and those of `lost`, with the reason, anew; the others
        go on. Returns the addresses, in rank order.

        It does not wait until they listen: `wait_exit` tells of one that never will. GroupError
        when the system refuses a process or a folder.
        """
        had_some = bool(self._processes)
        for rank in set(lost) & set(self._processes):
            _log.warning("worker %d is started anew: %s", rank, lost[rank])
        await self._end([rank for rank, one in self._processes.items() if one.has_ended] + [*lost])
        try:
            for rank in range(self._world_size):
                if rank not in self._processes:
                    await self._spawn_rank(rank)
                elif had_some:
                    _log.info("worker %d goes on and keeps its weights", rank)
        except OSError as error:
            raise GroupError(f"cannot start a worker process: {error}") from error
        return tuple(f"unix:{self._socket(rank)}" for rank in range(self._world_size))

    async def prepare(self, num_standby: int) -> None:
        """Sees to it that so many processes wait to take a lost rank's place: loading libraries is
        most of a rank's start."""
        self._waiting = [one for one in self._waiting if not one.has_ended]
        while self._standby is not None and len(self._waiting) < num_standby:
            try:
                process = await self._start(self._standby, asyncio.subprocess.PIPE)
            except OSError as error:
                _log.warning("cannot start a standby worker: %s", error)
                return
            self._waiting.append(_WorkerProcess(_STANDBY, process))

    async def wait_exit(self) -> GroupError:
        """Waits until any rank has ended by itself; as _WorkerProcess.wait."""
        waits = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def stop(self) -> None:
        """Ends every process, politely at first, and removes the sockets' folder."""
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(
            self._end(list(self._processes), _END_GRACE_S), *(one.end(0) for one in waiting)
        )
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    async def _spawn_rank(self, rank: int) -> None:
        path = self._socket(rank)
        path.unlink(missing_ok=True)
        address = f"unix:{path}"
        command = self._command(rank, address)
        while self._waiting:
            standby = self._waiting.pop()
            if await standby.tell(rank, command[len(_PROGRAM) :]):
                _log.info("worker %d: taken by a standby, listens at %s", rank, address)
                self._processes[rank] = standby
                return
            await standby.end(0)
        process = await self._start(command, asyncio.subprocess.DEVNULL)
        _log.info("worker %d: started as process %d, listens at %s", rank, process.pid, address)
        self._processes[rank] = _WorkerProcess(rank, process)

    @staticmethod
    async def _start(command: Sequence[str], stdin: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**_WORKER_ENVIRONMENT, **os.environ},
            limit=_MAX_LINE_BYTES,
            # Ctrl-C is for us alone: workers must outlive the drain.
            start_new_session=True,
        )

    def _socket(self, rank: int) -> Path:
        if self._folder is None:
            remove_left_folders()
            self._folder = _SocketFolder()
        return self._folder.path / f"worker-{rank}.sock"

    async def _end(self, ranks: Sequence[int], grace_s: float = 0) -> None:
        ended = [self._processes.pop(rank) for rank in set(ranks) & set(self._processes)]
        await asyncio.gather(*(process.end(grace_s) for process in ended))
