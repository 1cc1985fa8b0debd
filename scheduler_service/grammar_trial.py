"""Trials of constraints in a process that may crash, or be ended, in place of ours.

`python -m scheduler_service.grammar_trial` holds a vocabulary, and has always forked a child that
waits for the next constraint: it compiles it within bounds of time, memory and stack, answers and
ends. So every trial has a fresh process, and none waits for one to start.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import llguidance

from .errors import InvalidArgumentError, UnavailableError
from .generate_call import ConstraintSpec
from .grammar_text import grammar_text
from .vocabulary import Vocabulary, with_stack

# What a trial may take. The library recurses along chains of rules and of $refs.
MEMORY_BYTES = 256 << 20
STACK_BYTES = 32 << 20
# Of that, to make masks: any thread has more.
MASK_STACK_BYTES = 1 << 20
# Until an answer, the start of the process included; what takes longer is the machine's fault.
_ANSWER_SECONDS = 20.0
# For a process in which nothing is tried to end by itself.
_END_SECONDS = 0.5

COMMAND = (sys.executable, "-m", "scheduler_service.grammar_trial")

# What a constraint can do to its trial; any other signal comes from outside.
_FAULTS = frozenset(
    (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
)

_LENGTH = struct.Struct(">Q")
_ANSWERED, _NO_MORE, _FAULT = 0, 3, 4

_log = logging.getLogger(__name__)


class OutOfTimeError(Exception):
    """A trial took all the time that it had."""


class GrammarTrial:
    """The process, started by the first trial and anew after a fault. Safe to use from several
    threads, for one trial at a time."""

    def __init__(self, texts: Sequence[bytes], command: Sequence[str] = COMMAND) -> None:
        """texts: as of Vocabulary."""
        self._texts = json.dumps([text.decode("latin-1") for text in texts]).encode()
        self._command = command
        self._turn = threading.Lock()
        # Held to start and to end the process, not while it works.
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def run(self, spec: ConstraintSpec, leading: Sequence[str], seconds: float) -> int:
        """Blocks. leading: texts before the output, each a grammar of its own; seconds: of a
        processor. Returns the bytes of memory that it takes compiled.

        InvalidArgumentError when it does not, or breaks a bound of memory or stack; OutOfTimeError;
        UnavailableError when there is no process to try it in.
        """
        spoken = (spec.kind, spec.source, spec.choices, list(leading), seconds)
        request = json.dumps(spoken).encode()
        with self._turn:
            try:
                answer = self._answer(request)
            except (OSError, ValueError) as error:
                self._end()
                raise UnavailableError(
                    f"no constraint can be tried now: {self._reason(error)}; try again later"
                ) from error
        return _checked(spec.kind, answer)

    def stop(self) -> None:
        """The trial under way and later ones get UnavailableError. Does not block."""
        self._is_closed = True
        self._hang_up()

    def close(self) -> None:
        """As stop, and ends the process, also in the midst of a trial."""
        self.stop()
        self._end()

    def _reason(self, error: OSError | ValueError) -> str:
        if self._is_closed:
            return "the server ends"
        # The system's words without the path that may stand beside them.
        return getattr(error, "strerror", None) or str(error) or "no answer"

    def _answer(self, request: bytes) -> dict[str, Any]:
        """What the process says; OSError when it does not, or cannot be started."""
        with self._lock:
            if self._is_closed:
                raise OSError("the server ends")
            if self._process is not None and self._process.poll() is not None:
                self._forget()  # Somebody ended it while nothing was tried.
            if self._socket is None:
                self._start()
            channel = self._socket
        assert channel is not None
        channel.sendall(_LENGTH.pack(len(request)) + request)
        answer = json.loads(_read(channel.recv))
        assert isinstance(answer, dict)
        return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        ours.settimeout(_ANSWER_SECONDS)
        with theirs:
            # Ctrl-C is for us alone, and a group of its own can be ended as a whole.
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.sendall(_LENGTH.pack(len(self._texts)) + self._texts)

    def _end(self) -> None:
        """Where nothing is tried the processes end by themselves, else they are killed."""
        with self._lock:
            self._hang_up()
            if self._process is not None:
                try:
                    self._process.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()
            self._forget()

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None

    def _hang_up(self) -> None:
        """Wakes who waits for an answer."""
        if (channel := self._socket) is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)


def _checked(kind: str, answer: dict[str, Any]) -> int:
    if "refused" in answer:
        raise InvalidArgumentError(answer["field"], answer["refused"])
    if number := answer.get("signal"):
        if number == signal.SIGPROF:
            raise OutOfTimeError
        name = signal.Signals(number).name
        _log.info("a constraint (%s) ended its trial by %s and is refused", kind, name)
        raise InvalidArgumentError(
            kind,
            f"too complex: compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory or "
            f"{STACK_BYTES >> 20} MiB of stack ({name}); make it simpler",
        )
    return int(answer["bytes"])


def _read(recv: Callable[[int], bytes]) -> bytes:
    """One message; OSError where there is none."""
    (size,) = _LENGTH.unpack(_read_exactly(recv, _LENGTH.size))
    return _read_exactly(recv, size)


def _read_exactly(recv: Callable[[int], bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the process for trials has ended")
        data += part
    return bytes(data)


# What follows runs in the process for trials, whose standard input is the socket.


def serve(make: Callable[[list[bytes]], Vocabulary] = Vocabulary) -> int:
    """Answers until the other side closes; the exit status."""
    try:
        vocabulary = make([text.encode("latin-1") for text in json.loads(_read(_recv))])
    except ConnectionResetError:
        return 0
    gc.freeze()  # Else a collection in a child would copy all pages.
    while True:
        child = os.fork()
        if child == 0:
            _try_next(vocabulary)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == _NO_MORE:
            return 0
        # SIGKILL is none of a constraint's faults: the machine is out of memory.
        if code > 0 or (code < 0 and -code not in _FAULTS | {signal.SIGPROF}):
            return _FAULT
        try:
            if code < 0:
                _send({"signal": -code})
        except BrokenPipeError:
            return 0


def _try_next(vocabulary: Vocabulary) -> None:
    """All that the child does. Never returns."""
    code = _FAULT
    try:
        kind, source, choices, leading, seconds = json.loads(_read(_recv))
        _set_bounds(seconds)
        # The library's last words may be long, and hold the source.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _send(_tried(vocabulary, ConstraintSpec(kind, source, tuple(choices)), leading))
        code = _ANSWERED
    except (ConnectionResetError, BrokenPipeError):
        code = _NO_MORE
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _set_bounds(seconds: float) -> None:
    mapped, _ = _memory_bytes()
    _lower(resource.RLIMIT_AS, mapped + MEMORY_BYTES)
    # Where the machine has no more memory, it ends a trial before it ends a server.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    _lower(resource.RLIMIT_CORE, 0)
    # Both may have been changed by whoever started the server.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _memory_bytes() -> tuple[int, int]:
    """Of this process: mapped, and resident without what files hold."""
    with open("/proc/self/statm") as file:
        mapped, resident, shared, *_ = map(int, file.read().split())
    return mapped * resource.getpagesize(), (resident - shared) * resource.getpagesize()


def _lower(which: int, limit: int) -> None:
    _, most = resource.getrlimit(which)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(which, (limit, limit))


def _tried(vocabulary: Vocabulary, spec: ConstraintSpec, leading: Sequence[str]) -> dict[str, Any]:
    """The answer."""

    def compiled() -> list[llguidance.LLMatcher]:
        return [vocabulary.matcher(spec.kind, text) for text in texts]

    def followed() -> None:
        for matcher in matchers:
            vocabulary.rehearse(spec.kind, matcher)

    _, before = _memory_bytes()
    try:
        texts = [grammar_text(spec, each) for each in leading]
        matchers = with_stack(STACK_BYTES, compiled)
        with_stack(MASK_STACK_BYTES, followed)
    except UnavailableError:
        raise
    except BaseException as error:
        return _refusal(spec.kind, error)
    _, after = _memory_bytes()
    return {"bytes": max(0, after - before)}


def _refusal(kind: str, error: BaseException) -> dict[str, Any]:
    if isinstance(error, InvalidArgumentError):
        return {"field": error.field, "refused": error.description}
    if isinstance(error, MemoryError):
        return {"signal": int(signal.SIGABRT)}  # as the library says it
    if isinstance(error, RecursionError):
        return {"field": kind, "refused": "is nested too deeply"}
    return {"field": kind, "refused": f"does not compile: {type(error).__name__}: {error}"[:300]}


def _recv(size: int) -> bytes:
    return os.read(0, size)


def _send(answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    os.write(0, _LENGTH.pack(len(data)) + data)


if __name__ == "__main__":
    sys.exit(serve())
