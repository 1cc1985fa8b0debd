"""What the driver of Ray is told: one frozen record, from its command line."""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

STRATEGIES: Final = ("pack", "spread", "strict_pack", "strict_spread")
_HOST_AND_PORT: Final = re.compile(r"[^/]+:\d{1,5}")
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


def read_address(text: str) -> str:
    """Where the cluster is. argparse.ArgumentTypeError when Ray cannot be used so."""
    if text in ("auto", "local") or _HOST_AND_PORT.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is none of auto, local and HOST:PORT of the cluster's head; this machine must "
        "be a node of the cluster"
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_launch(arguments: Sequence[str]) -> Launch:
    """UsageError when a setting cannot be."""
    own = Launch("", 1)
    parser = _Parser(prog="python -m slotwise_cli.ray_driver")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=own.world_size)
    parser.add_argument("--ray-address", type=read_address, default=own.address)
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
