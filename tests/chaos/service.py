"""A scheduler that is started again when it is killed, as a container's restart policy would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import psutil
from free_ports import fixed_port

from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

# They end what hangs, on a slow and busy machine too.
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 180
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    # A server that comes back is dialled at once.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
]


def dial(address: str) -> grpc.Channel:
    """A channel with a connection of its own, which dials again quickly."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


class Service:
    """One address behind which schedulers come and go.

    `folder` holds what they leave: the journal's folder, the sockets' folders, the log. A scheduler
    that ends by SIGKILL is started again at once; one that ends in another way is not.
    """

    def __init__(
        self,
        model: Path | str,
        folder: Path,
        flags: Sequence[str] = (),
        *,
        journal: bool = True,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`prefix` is a command that runs the scheduler in its own process, as `ip netns exec`."""
        self.folder = folder
        self.host = host
        self.port = fixed_port()
        # What watchers and probes dial; to be set where this machine does not reach the host.
        self.address = f"{host}:{self.port}"
        self.socket_folder = folder / "tmp"
        self.socket_folder.mkdir(parents=True)
        self.log_file = folder / "scheduler.log"
        command = [sys.executable, "-m", "scheduler_service", "--model", str(model), "--events"]
        command += ["--host", host, "--port", str(self.port), *flags]
        if journal:
            command += ["--journal", str(folder / "journal")]
        # Of the next start.
        self.prefix = prefix
        self._command = command
        self._environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.socket_folder),
            **(environment or {}),
        }
        self.num_starts = 0
        # (start, seconds) of the monotonic clock: how long each scheduler took to be ready.
        self.start_times: list[float] = []
        # What went wrong on its own.
        self.faults: list[str] = []
        # Every process that was ever started here.
        self.pids: set[int] = set()
        self.process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._is_ready = False
        self._restarts = True
        self._keeper: threading.Thread | None = None

    def start(self) -> None:
        """Starts a scheduler and the thread that keeps one; returns at once."""
        self._restarts = True
        self._spawn()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the scheduler of now has said that it is ready."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._is_ready or self.faults, timeout_s)
        assert ready, f"not ready within {timeout_s} s:\n{self.last_words()}"
        assert not self.faults, self.faults

    @property
    def is_ready(self) -> bool:
        """The scheduler of now has once been ready, and has not ended."""
        return self._is_ready

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def ranks(self) -> list[int]:
        """Process ids of the workers that live now, by rank; those just starting among them."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank = _rank_of(child)
                    if rank is not None:
                        found[rank] = child.pid
        self.pids |= set(found.values())
        return [found[rank] for rank in sorted(found)]

    def kill(self) -> None:
        """kill -9 of the scheduler."""
        with self._changed:
            self._is_ready = False
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        self._note_pids()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def stop(self) -> int:
        """SIGTERM to the scheduler of now; its exit code. No other one is started."""
        self._restarts = False
        assert self.process is not None
        self.signal(signal.SIGTERM)
        return self.wait_end()

    def wait_end(self) -> int:
        """Waits for the end of the scheduler of now; its exit code."""
        self._restarts = False
        assert self.process is not None
        assert self._keeper is not None
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not end:\n{self.last_words()}") from None
        self._keeper.join()
        return code

    def end(self) -> None:
        """Whatever the state: nothing of it runs afterwards."""
        self._restarts = False
        self._note_pids()
        if self.process is not None:
            # A stopped one as well.
            self.process.kill()
            self.process.wait()
        if self._keeper is not None:
            self._keeper.join()
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def living(self) -> list[int]:
        """Processes that were started here and are there still."""
        return [pid for pid in sorted(self.pids) if _belongs(pid, self.socket_folder)]

    def stub(self) -> rpc.InferenceStub:
        """On a channel of its own, that ends with the process."""
        return rpc.InferenceStub(dial(self.address))

    def last_words(self) -> str:
        return "".join(self.log_file.read_text(errors="replace").splitlines(True)[-60:])

    def _spawn(self) -> None:
        with self._changed:
            self._is_ready = False
        self.num_starts += 1
        started = time.monotonic()
        with self.log_file.open("a") as log:
            process = subprocess.Popen(
                [*self.prefix, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                cwd="/",
                start_new_session=True,
            )
        self.process = process
        self.pids.add(process.pid)
        reader = threading.Thread(target=self._read, args=(process, started), daemon=True)
        reader.start()

    def _read(self, process: subprocess.Popen[str], started: float) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "ready" and process is self.process:
                with self._changed:
                    self._is_ready = True
                    self.start_times.append(time.monotonic() - started)
                    self._changed.notify_all()

    def _keep(self) -> None:
        while True:
            assert self.process is not None
            code = self.process.wait()
            with self._changed:
                self._is_ready = False
                if self._restarts and code != -signal.SIGKILL:
                    words = self.last_words()
                    self.faults.append(f"the scheduler ended by itself with {code}:\n{words}")
                    self._changed.notify_all()
                    return
            if not self._restarts:
                return
            self._spawn()

    def _note_pids(self) -> None:
        """The children of now: those that outlive the scheduler are found by them later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.pid).children(recursive=True)
            self.pids |= {child.pid for child in tree}


def _belongs(pid: int, socket_folder: Path) -> bool:
    """The process lives and was started with this folder: ids are used again."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get("TMPDIR") == str(socket_folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _rank_of(process: psutil.Process) -> int | None:
    """Of a worker: where it was told to listen, or, as it was a standby, where it does."""
    words = process.cmdline()
    if "worker" not in words:
        return None
    places = (
        words if "--listen" in words else [one.laddr for one in process.net_connections("unix")]
    )
    found = [re.search(r"worker-(\d+)\.sock", str(place)) for place in places]
    return next((int(match[1]) for match in found if match), None)


def check_nothing_left(service: Service, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """No process, port or folder of sockets is left. What is ending is waited for."""
    _, left = psutil.wait_procs(list(_processes(service.living())), timeout_s)
    told = [(one.pid, one.ppid(), one.cmdline()[-6:], f"{one.create_time():.0f}") for one in left]
    assert not left, f"still there: {told}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", service.port))
    assert not list(service.socket_folder.iterdir()), "folders of sockets are left"


def _processes(pids: Sequence[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def shared_memory(pids: Sequence[int]) -> set[str]:
    """Names below /dev/shm that these processes have mapped."""
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    names.add(line[line.index("/dev/shm/") :].split(" ")[0])
    return names


def poll(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits for what nothing announces, as the state of another process."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def epoch_of(stub: rpc.InferenceStub) -> int:
    return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=STOP_TIMEOUT_S).epoch
