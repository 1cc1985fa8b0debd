"""`python -m slotwise_cli.ray_driver`: has Ray place the ranks of one replica, and tells where they
are, one JSON line on standard output for each change; a process of its own, for Ray ends the one
that it is used in when its cluster is lost.

Exit 0 after SIGTERM, with nothing left in the cluster; 1 when the ranks cannot run.
"""

import argparse
import contextlib
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

# Nothing is told to Ray's makers, and GPUs are hidden from actors that ask for none.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .ray_rank import Ended, Listening, News, Placed, RankKeeper, Said, WorkerPlan

STRATEGIES: Final = ("pack", "spread", "strict_pack", "strict_spread")
_POLL_S: Final = 0.5
# Between tries to reach an actor that is on its way to another node, and reports of it.
_RETRY_S: Final = 0.5
_REPORT_S: Final = 10.0
# For all workers to end; more than a keeper gives its own.
_STOP_S: Final = 10.0
# A line that a worker logged: the time, the level, the rest.
_LOG_LINE: Final = re.compile(r"\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")


_RESOURCE: Final = re.compile(r"([^=]+)=(\d+|\d*\.\d+)")


class LaunchError(Exception):
    """The ranks cannot run; the message says why and what to do."""


class UsageError(Exception):
    """A setting cannot be."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to run, and where."""

    model_dir: str
    world_size: int
    # "auto": the cluster of this machine; "local": one for this process alone; host:port.
    address: str = "auto"
    strategy: str = "pack"
    # "auto": GPUs if the cluster has any.
    device: str = "auto"
    # Of a rank on the CPU; 0: the smallest node's CPUs // ranks, at least 1.
    num_threads: int = 0
    # Of each rank, besides its GPU or CPUs.
    resources: Mapping[str, float] = field(default_factory=dict)
    worker_flags: tuple[str, ...] = ()
    # For the cluster to have room.
    timeout_s: float = 60.0
    log_level: str = "warning"
    log_format: str = "text"


class Log:
    """Lines on standard error, in the form of the scheduler's."""

    def __init__(self, level: str, form: str) -> None:
        self._least = logging.getLevelNamesMapping()[level.upper()]
        self._is_json = form == "json"

    def write(self, level: str, logger: str, message: str) -> None:
        if logging.getLevelNamesMapping()[level] < self._least:
            return
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = f"{moment} {level} {logger}: {message}"
        if self._is_json:
            values = {"time": moment, "level": level.lower(), "logger": logger, "message": message}
            text = json.dumps(values, ensure_ascii=False)
        print(text.replace("\n", "\\n"), file=sys.stderr, flush=True)


def bundle(launch: Launch) -> dict[str, float]:
    """What a rank asks of the cluster that we are connected to. LaunchError when that cannot be."""
    on_gpu = launch.device == "cuda"
    if launch.device == "auto":
        on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    if on_gpu:
        if launch.num_threads:
            raise LaunchError(
                f"--threads is {launch.num_threads} and the ranks run on GPUs, which have no use "
                "for threads; leave it out, or give --device cpu"
            )
        return {"GPU": 1, **launch.resources}
    counts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    smallest = min((count for count in counts if count), default=1)
    threads = launch.num_threads or max(1, smallest // launch.world_size)
    return {"CPU": threads, **launch.resources}


def describe_cluster() -> str:
    """What each node has, and what is free in all, for people."""
    nodes = [
        f"{node['NodeManagerAddress']} ({_amounts(node['Resources'])})"
        for node in ray.nodes()
        if node["Alive"]
    ]
    return f"nodes: {', '.join(nodes)}; free in all: {_amounts(ray.available_resources())}"


def _amounts(resources: Mapping[str, float]) -> str:
    own = ("memory", "object_store_memory")
    names = sorted(name for name in resources if name not in own and not _is_internal(name))
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"


def _is_internal(name: str) -> bool:
    """Nodes' own names, and shares of placement groups."""
    return name.startswith(("node:", "accelerator_type")) or "_group_" in name


@dataclass(slots=True)
class _Rank:
    """What is known of a rank."""

    actor: Any
    place: Placed | None = None
    listening: Listening | None = None
    has_listened: bool = False
    # Of its last line.
    log_level: str = "INFO"
    # When it lost its place, or when that was reported last.
    lost_s: float = 0.0


class Ranks:
    """The actors of one replica."""

    def __init__(self, launch: Launch, log: Log, stop: threading.Event) -> None:
        """Asks the cluster that we are connected to for room."""
        self._launch = launch
        self._log = log
        self._stop = stop
        self._bundle = bundle(launch)
        self._threads = int(self._bundle.get("CPU", 0))
        self._group = placement_group(
            [self._bundle] * launch.world_size, strategy=launch.strategy.upper()
        )
        self._ranks: list[_Rank] = []

    def place(self) -> None:
        """Waits for room in the cluster and puts the actors there. LaunchError when there is none
        in time."""
        _tell(event="loading", stage=f"waiting for {self._asked()}")
        deadline = time.monotonic() + self._launch.timeout_s
        while not self._group.wait(_POLL_S):
            if self._stop.is_set():
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the Ray cluster has no room for {self._asked()}; {describe_cluster()}; "
                    f"waited {self._launch.timeout_s:g} s (--ray-timeout)"
                )
        _tell(event="loading", stage="starting the workers")
        own = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        options = {
            "num_cpus": self._threads,
            "num_gpus": self._bundle.get("GPU", 0),
            "resources": own,
            # On another node, if its own is lost.
            "max_restarts": -1,
            # `news` waits in one thread.
            "max_concurrency": 3,
        }
        for rank in range(self._launch.world_size):
            where = PlacementGroupSchedulingStrategy(self._group, rank)
            actor = ray.remote(RankKeeper).options(**options, scheduling_strategy=where).remote()
            self._ranks.append(_Rank(actor))

    def watch(self) -> None:
        """Tells of every change, until `stop`. LaunchError when a rank cannot start at first."""
        asked = {one.actor.news.remote(): rank for rank, one in enumerate(self._ranks)}
        # Ranks out of reach, and when to ask again.
        later: dict[int, float] = {}
        while not self._stop.is_set():
            done, _ = ray.wait(list(asked), timeout=_POLL_S) if asked else ([], [])
            for reference in done:
                rank = asked.pop(reference)
                if self._heard(rank, reference):
                    asked[self._ranks[rank].actor.news.remote()] = rank
                else:
                    later[rank] = time.monotonic() + _RETRY_S
            for rank in [rank for rank, due in later.items() if time.monotonic() > due]:
                del later[rank]
                asked[self._ranks[rank].actor.news.remote()] = rank
            if not asked:
                self._stop.wait(_RETRY_S)
            self._report_lost()

    def end(self) -> None:
        """Ends workers and actors and gives their room back."""
        stops = [one.actor.stop.remote() for one in self._ranks if one.place is not None]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=_STOP_S)
        for one in self._ranks:
            ray.kill(one.actor, no_restart=True)
        remove_placement_group(self._group)

    def _heard(self, rank: int, reference: Any) -> bool:
        """Takes a rank's news; False when its actor cannot be reached now."""
        try:
            for news in ray.get(reference):
                self._take(rank, news)
        except ActorUnavailableError as error:
            self._lose(rank, str(error))
            return False
        except RayError as error:
            raise LaunchError(f"rank {rank} cannot run in the cluster: {error}") from error
        return True

    def _take(self, rank: int, news: News) -> None:
        one = self._ranks[rank]
        if isinstance(news, Said):
            text = news.line
            # Lines without a level, as those of a traceback, belong to the one before.
            if match := _LOG_LINE.fullmatch(text):
                one.log_level, text = match[1], match[2]
            self._log.write(one.log_level, "slotwise.worker", f"worker {rank}: {text}")
        elif isinstance(news, Placed):
            one.place, one.listening = news, None
            self._note("INFO", f"rank {rank} is placed on {_name(news)}")
            self._start_workers()
        elif isinstance(news, Listening):
            one.listening, one.has_listened = news, True
            self._tell_places()
        else:
            self._take_end(rank, news)

    def _take_end(self, rank: int, ended: Ended) -> None:
        one = self._ranks[rank]
        assert one.place is not None
        words = f"rank {rank} on {_name(one.place)}: {ended.words}"
        if not one.has_listened and not ended.was_killed:
            raise LaunchError(words)
        self._note("ERROR", f"{words}; it is started anew")
        one.listening = None
        self._tell_places()

    def _lose(self, rank: int, why: str) -> None:
        one = self._ranks[rank]
        if one.place is None:
            return
        first_line = why.strip().splitlines()[0]
        self._note("ERROR", f"rank {rank} on {_name(one.place)} is lost: {first_line}")
        one.place = one.listening = None
        one.lost_s = time.monotonic()
        self._tell_places()

    def _report_lost(self) -> None:
        for rank, one in enumerate(self._ranks):
            if one.place is None and one.lost_s and time.monotonic() - one.lost_s > _REPORT_S:
                one.lost_s = time.monotonic()
                asked = _amounts(self._bundle)
                self._note("WARNING", f"rank {rank} waits for {asked}; {describe_cluster()}")

    def _start_workers(self) -> None:
        """Once all are placed: ranks of one node see each other's GPUs, to reach their memory."""
        places = [one.place for one in self._ranks]
        for one in self._ranks:
            if None in places or one.place is None:
                return
            here = [place for place in places if place and place.node == one.place.node]
            visible = [gpu for place in here for gpu in place.gpus]
            one.actor.start.remote(worker_plan(self._launch, self._threads, one.place, visible))

    def _tell_places(self) -> None:
        heard = [one.listening for one in self._ranks]
        first = heard[0]
        _tell(
            event="workers",
            workers=[one.address if one else None for one in heard],
            rendezvous=first.rendezvous if first and len(heard) > 1 else "",
        )

    def _asked(self) -> str:
        launch = self._launch
        return f"{launch.world_size} x ({_amounts(self._bundle)}), {launch.strategy}"

    def _note(self, level: str, message: str) -> None:
        self._log.write(level, "slotwise.ray", message)


def worker_plan(launch: Launch, threads: int, place: Placed, visible: Sequence[str]) -> WorkerPlan:
    """threads 0: it runs on a GPU, one of those that ranks on its node have (`visible`)."""
    if threads:
        flags = ["--device", "cpu", "--threads", str(threads)]
    else:
        index = visible.index(place.gpus[0]) if place.gpus else 0
        flags = ["--device", f"cuda:{index}"]
    return WorkerPlan(launch.model_dir, (*flags, *launch.worker_flags), tuple(visible))


def _name(place: Placed) -> str:
    return place.host if place.host == place.address else f"{place.host} ({place.address})"


def _tell(**event: object) -> None:
    # Whoever reads it may be gone; then a signal comes.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(event), flush=True)


def connect(launch: Launch) -> None:
    """Connects to the cluster, or starts one. LaunchError when there is none."""
    # A cluster that is there has its own settings.
    starts = {"include_dashboard": False} if launch.address == "local" else {}
    try:
        ray.init(launch.address, log_to_driver=False, logging_level="ERROR", **starts)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        words = " ".join(str(error).split())
        raise LaunchError(
            f"no Ray cluster can be used at --ray-address {launch.address}: {words}; start one "
            "with `ray start --head`, join this machine with `ray start --address HOST:PORT`, or "
            "give --ray-address local"
        ) from error


def run(launch: Launch) -> None:
    """Until a signal. LaunchError when the ranks cannot run."""
    stop = threading.Event()
    connect(launch)
    # Ray has handlers of its own, which end the process at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        ranks = Ranks(launch, Log(launch.log_level, launch.log_format), stop)
        try:
            ranks.place()
            ranks.watch()
        finally:
            ranks.end()
    finally:
        ray.shutdown()


def read_resources(text: str) -> dict[str, float]:
    """`name=amount,name=amount`. argparse.ArgumentTypeError when it is not that."""
    resources = {}
    for pair in filter(None, text.split(",")):
        match = _RESOURCE.fullmatch(pair)
        if match is None or match[1] in ("CPU", "GPU") or not float(match[2]) > 0:
            raise argparse.ArgumentTypeError(
                f"{pair!r} is no custom resource and its amount, as in disk=1"
            )
        resources[match[1]] = float(match[2])
    return resources


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parse(arguments: Sequence[str]) -> Launch:
    own = Launch("", 1)
    parser = _Parser(prog="python -m slotwise_cli.ray_driver")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=own.world_size)
    parser.add_argument("--ray-address", default=own.address)
    parser.add_argument("--ray-strategy", choices=STRATEGIES, default=own.strategy)
    parser.add_argument("--ray-resources", type=read_resources, default={})
    parser.add_argument("--ray-timeout", type=float, default=own.timeout_s)
    parser.add_argument("--ray-worker-flags", type=shlex.split, default=[])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default=own.device)
    parser.add_argument("--threads", type=int, default=own.num_threads)
    parser.add_argument("--log-level", default=own.log_level)
    parser.add_argument("--log-format", default=own.log_format)
    given = parser.parse_args(arguments)
    for name, value, least in (("tp", given.tp, 1), ("threads", given.threads, 0)):
        if value < least:
            raise UsageError(f"{name} is {value}; at least {least} is needed")
    return Launch(
        model_dir=given.model,
        world_size=given.tp,
        address=given.ray_address,
        strategy=given.ray_strategy,
        device=given.device,
        num_threads=given.threads,
        resources=given.ray_resources,
        worker_flags=tuple(given.ray_worker_flags),
        timeout_s=given.ray_timeout,
        log_level=given.log_level,
        log_format=given.log_format,
    )


def main(arguments: Sequence[str]) -> int:
    try:
        run(_parse(arguments))
    except (LaunchError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
