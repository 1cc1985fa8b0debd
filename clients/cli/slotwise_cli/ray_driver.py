"""`python -m slotwise_cli.ray_driver`: has Ray place the ranks of one replica, and tells where they
are, one JSON line on standard output for each change; a process of its own, for Ray ends the one
that it is used in when its cluster is lost.

Exit 0 after SIGTERM, with nothing left in the cluster; 1 when the ranks cannot run.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

# Nothing is told to Ray's makers, and GPUs are hidden from actors that ask for none.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import RayError

from .ray_launch import Launch, LaunchError, UsageError, parse_launch
from .ray_ranks import Log, Ranks

_RETRY_S: Final = 0.5


def main(arguments: Sequence[str]) -> int:
    try:
        run(parse_launch(arguments))
    except (LaunchError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def run(launch: Launch) -> None:
    """Until a signal. LaunchError when the ranks cannot run."""
    stop = threading.Event()
    connect(launch)
    # Ray has handlers of its own, which end the process at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        ranks = Ranks(launch, Log(launch.log_level, launch.log_format), _tell, stop)
        try:
            ranks.place()
            ranks.watch()
        finally:
            ranks.end()
    finally:
        ray.shutdown()


def connect(launch: Launch) -> None:
    """Connects to the cluster, or starts one. LaunchError when there is none."""
    if launch.address not in ("auto", "local"):
        _tell(event="loading", stage=f"waiting for the Ray cluster at {launch.address}")
        _wait_until_open(launch.address, launch.timeout_s)
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


def _wait_until_open(address: str, timeout_s: float) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or error
                raise LaunchError(
                    f"no Ray cluster answers at --ray-address {address}: {why}; "
                    f"waited {timeout_s:g} s (--ray-timeout)"
                ) from error
            time.sleep(_RETRY_S)


def _tell(**event: object) -> None:
    # Whoever reads it may be gone; then a signal comes.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
