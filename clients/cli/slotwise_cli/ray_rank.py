"""The keeper of one rank on its node, as an actor of Ray: starts the worker process, watches it,
starts it anew, ends it. What it tells is asked for with `news`.

The scheduler's messages go past it, straight to the worker's own port.
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ray

# Between starts of a worker; one that has listened is followed at once.
_FIRST_DELAY_S: Final = 0.5
_MAX_DELAY_S: Final = 30.0
# How long `news` waits for the first piece.
_NEWS_S: Final = 5.0
_END_GRACE_S: Final = 3.0
# Between looks at the raylet.
_RAYLET_S: Final = 0.5
_MAX_LINES: Final = 10_000
# As `python -m worker --exit-with-parent` takes it.
_END_SIGNAL: Final = signal.SIGUSR1
# Of a worker that cannot free itself: another process can.
_EXIT_STUCK: Final = 75
# For the worker, unless set. Programs with NVLink multicast have put all GPUs of a host out of
# service for a day; the sums between ranks do without.
_ENVIRONMENT: Final = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
_LISTENS: Final = re.compile(r".* worker: listening on (\S+)")
# Below those that the kernel gives to whoever asks for any, above those of Ray's own workers.
_RENDEZVOUS_PORTS: Final = range(20_000, 30_000)


@dataclass(frozen=True, slots=True)
class Placed:
    """The actor is on a node. `address`: the node's; `gpus`: those that Ray gave it."""

    node: str
    address: str
    host: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listening:
    """The worker can be dialled; ranks may meet at `rendezvous` if this is the first one."""

    address: str
    rendezvous: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker has ended by itself, or could not start. `was_killed`: another may fare better."""

    words: str
    was_killed: bool


@dataclass(frozen=True, slots=True)
class Said:
    """A line of the worker's log."""

    line: str


News = Placed | Listening | Ended | Said


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How a worker is started. `model_dir` must be there; `visible_gpus` become CUDA's."""

    model_dir: str
    flags: tuple[str, ...]
    visible_gpus: tuple[str, ...] = ()


class NewsLog:
    """What a keeper has to tell, kept until it is known to have arrived."""

    def __init__(self) -> None:
        self._grown = threading.Condition()
        self._kept: deque[News] = deque()
        self._num_dropped = 0

    def put(self, news: News) -> None:
        with self._grown:
            # Lines that nobody fetches are not worth the memory.
            if not isinstance(news, Said) or len(self._kept) < _MAX_LINES:
                self._kept.append(news)
                self._grown.notify_all()

    def after(self, num_heard: int) -> list[News]:
        """All after the first `num_heard`, which are dropped; waits a while for one."""
        with self._grown:
            while self._kept and self._num_dropped < num_heard:
                self._kept.popleft()
                self._num_dropped += 1
            self._grown.wait_for(lambda: self._kept, _NEWS_S)
            return list(self._kept)


class RankKeeper:
    """At most one worker at a time. Methods may be called from several threads."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._address = ray.util.get_node_ip_address()
        self._news = NewsLog()
        self._lock = threading.Lock()
        self._plan: WorkerPlan | None = None
        self._keeping: _Keeping | None = None
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self._news.put(
            Placed(
                node=ray.get_runtime_context().get_node_id(),
                address=self._address,
                host=socket.gethostname(),
                gpus=tuple(gpus.split(",")) if gpus else (),
            )
        )
        threading.Thread(target=_end_with_raylet, args=(os.getppid(),), daemon=True).start()

    def news(self, name: str, num_heard: int) -> tuple[str, list[News]]:
        """What has happened since `num_heard` pieces of news; waits a while for the first one.

        Also our name: who has heard those of another keeper begins anew.
        """
        return self._name, self._news.after(num_heard if name == self._name else 0)

    def start(self, plan: WorkerPlan) -> None:
        """Keeps a worker of this plan from now on; the same plan again changes nothing."""
        with self._lock:
            if plan == self._plan:
                return
            if self._keeping is not None:
                self._keeping.stop()
            self._plan = plan
            self._keeping = _Keeping(plan, self._address, self._news)

    def stop(self) -> None:
        """Ends the worker, politely at first, and returns when it has ended."""
        with self._lock:
            if self._keeping is not None:
                self._keeping.stop()
            self._keeping = self._plan = None


class _Keeping:
    """One thread that starts the worker again and again. The worker ends with the thread, by the
    kernel's hand (--exit-with-parent), so the thread outlives it."""

    def __init__(self, plan: WorkerPlan, address: str, news: NewsLog) -> None:
        self._plan = plan
        self._address = address
        self._news = news
        self._is_told = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the worker has ended."""
        with self._lock:
            self._is_told.set()
            process = self._process
        if process is not None:
            process.send_signal(_END_SIGNAL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_GRACE_S)
            process.kill()
        self._thread.join()

    def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        while not self._is_told.is_set():
            if self._run_once():
                delay_s = _FIRST_DELAY_S
                continue
            self._is_told.wait(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _run_once(self) -> bool:
        """One life of a worker; whether it has listened."""
        folder = self._plan.model_dir
        if not Path(folder).is_dir():
            self._news.put(
                Ended(
                    f"there is no folder {folder}; the model is needed there on every node", False
                )
            )
            return False
        with self._lock:
            if self._is_told.is_set():
                return False
            try:
                self._process = self._spawn()
            except OSError as error:
                self._news.put(Ended(f"no worker can be started: {error}", False))
                return False
        last_lines, has_listened = self._follow(self._process)
        code = self._process.wait()
        if not self._is_told.is_set():
            was_killed = code < 0 or code == _EXIT_STUCK
            self._news.put(Ended(f"{_ended_by(code)}: {_last_words(last_lines)}", was_killed))
        return has_listened

    def _spawn(self) -> subprocess.Popen[str]:
        plan = self._plan
        listen = f"[{self._address}]:0" if ":" in self._address else f"{self._address}:0"
        environment = {**_ENVIRONMENT, **os.environ}
        if plan.visible_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.visible_gpus)
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "worker", "--listen", listen, "--model", plan.model_dir),
                *plan.flags,
                *("--exit-with-parent", str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            # Ray's own signals are not for it.
            start_new_session=True,
        )

    def _follow(self, process: subprocess.Popen[str]) -> tuple[Sequence[str], bool]:
        """Passes lines on until there are no more."""
        last_lines: deque[str] = deque(maxlen=20)
        has_listened = False
        assert process.stdout is not None
        for line in process.stdout:
            text = line.rstrip()
            last_lines.append(text)
            self._news.put(Said(text))
            if not has_listened and (match := _LISTENS.fullmatch(text)):
                has_listened = True
                self._news.put(Listening(match[1], self._rendezvous()))
        return last_lines, has_listened

    def _rendezvous(self) -> str:
        host = f"[{self._address}]" if ":" in self._address else self._address
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        for port in random.SystemRandom().sample(_RENDEZVOUS_PORTS, 100):
            with socket.socket(family) as probe, contextlib.suppress(OSError):
                probe.bind((self._address, port))
                return f"{host}:{port}"
        return ""


def _end_with_raylet(raylet: int) -> None:
    """Ray leaves an actor behind whose node was lost by the death of its raylet; the worker would
    hold memory that Ray gives to others."""
    while os.getppid() == raylet:
        time.sleep(_RAYLET_S)
    os._exit(1)


def _ended_by(code: int) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"the worker was killed by {signal.Signals(-code).name}"
    return f"the worker was killed by signal {-code}"


def _last_words(lines: Sequence[str]) -> str:
    return lines[-1].removeprefix("worker: ") if lines else "it said nothing"
