"""The ranks of one replica in a Ray cluster: room for them, keepers, and where the workers are."""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .ray_launch import Launch, LaunchError
from .ray_rank import Ended, Listening, News, Placed, RankKeeper, Said, WorkerPlan

_POLL_S: Final = 0.5
# Between tries to reach an actor that is on its way to another node, and reports of it.
_RETRY_S: Final = 0.5
_REPORT_S: Final = 10.0
# For all workers to end; more than a keeper gives its own.
_STOP_S: Final = 10.0
# A line that a worker logged: the time, the level, the rest.
_LOG_LINE: Final = re.compile(r"\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")


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
    nodes = sorted(
        f"{node['NodeManagerAddress']} ({_amounts(node['Resources'])})"
        for node in ray.nodes()
        if node["Alive"]
    )
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
    # The keeper that was heard last, and how much of it.
    keeper: str = ""
    num_heard: int = 0
    place: Placed | None = None
    listening: Listening | None = None
    has_listened: bool = False
    # Of its last line.
    log_level: str = "INFO"
    # Its actor cannot be reached: since when, or when that was reported last.
    is_lost: bool = False
    lost_s: float = 0.0

    def ask(self) -> Any:
        """For its news."""
        return self.actor.news.remote(self.keeper, self.num_heard)


class Ranks:
    """The actors of one replica."""

    def __init__(
        self, launch: Launch, log: Log, tell: Callable[..., None], stop: threading.Event
    ) -> None:
        """Asks the cluster that we are connected to for room. `tell` takes the events."""
        self._launch = launch
        self._log = log
        self._tell = tell
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
        self._tell(event="loading", stage=f"waiting for {self._asked()}")
        deadline = time.monotonic() + self._launch.timeout_s
        while not self._group.wait(_POLL_S):
            if self._stop.is_set():
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the Ray cluster has no room for {self._asked()}; {describe_cluster()}; "
                    f"waited {self._launch.timeout_s:g} s (--ray-timeout)"
                )
        self._tell(event="loading", stage="starting the workers")
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
        asked = {one.ask(): rank for rank, one in enumerate(self._ranks)}
        # Ranks out of reach, and when to ask again.
        later: dict[int, float] = {}
        while not self._stop.is_set():
            done, _ = ray.wait(list(asked), timeout=_POLL_S) if asked else ([], [])
            for reference in done:
                rank = asked.pop(reference)
                if self._heard(rank, reference):
                    asked[self._ranks[rank].ask()] = rank
                else:
                    later[rank] = time.monotonic() + _RETRY_S
            for rank in [rank for rank, due in later.items() if time.monotonic() > due]:
                del later[rank]
                asked[self._ranks[rank].ask()] = rank
            if not asked:
                self._stop.wait(_RETRY_S)
            self._report_lost()

    def end(self) -> None:
        """Ends workers and actors and gives their room back."""
        stops = [one.actor.stop.remote() for one in self._ranks if not one.is_lost]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=_STOP_S)
        for one in self._ranks:
            ray.kill(one.actor, no_restart=True)
        remove_placement_group(self._group)

    def _heard(self, rank: int, reference: Any) -> bool:
        """Takes a rank's news; False when its actor cannot be reached now."""
        one = self._ranks[rank]
        try:
            keeper, heard = ray.get(reference)
        except ActorUnavailableError as error:
            self._lose(rank, str(error))
            return False
        except RayError as error:
            raise LaunchError(f"rank {rank} cannot run in the cluster: {error}") from error
        if keeper != one.keeper:
            one.keeper, one.num_heard, one.listening = keeper, 0, None
        one.num_heard += len(heard)
        was_lost, one.is_lost = one.is_lost, False
        for news in heard:
            self._take(rank, news)
        if was_lost:
            self._tell_places()
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
        if one.is_lost or one.place is None:
            return
        first_line = why.strip().splitlines()[0]
        self._note("ERROR", f"rank {rank} on {_name(one.place)} is lost: {first_line}")
        one.is_lost, one.lost_s = True, time.monotonic()
        self._tell_places()

    def _report_lost(self) -> None:
        for rank, one in enumerate(self._ranks):
            if one.is_lost and time.monotonic() - one.lost_s > _REPORT_S:
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
            if not one.is_lost:
                one.actor.start.remote(worker_plan(self._launch, self._threads, one.place, visible))

    def _tell_places(self) -> None:
        heard = [None if one.is_lost else one.listening for one in self._ranks]
        first = heard[0]
        self._tell(
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
