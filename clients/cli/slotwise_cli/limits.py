"""The limit that memory sets to decoding: no step is faster than its bytes can be read."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from slotwise_client import ServerInfo

from .geometry import DTYPE_BYTES, step_bytes
from .helper_process import run_json
from .output import Report

BandwidthOption = Annotated[
    float | None,
    typer.Option(min=0, help="Memory bandwidth in GB/s, for the limit \\[measured on a GPU]."),
]


class MemoryLimit:
    """Of one model, as one server holds it, at `bytes_per_s` of memory bandwidth per rank."""

    def __init__(self, folder: Path, server: ServerInfo, bytes_per_s: float) -> None:
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        worker = server.workers[0]
        self._weight_bytes = DTYPE_BYTES[worker.weight_dtype]
        self._kv_bytes = DTYPE_BYTES[worker.kv_dtype]
        self.bytes_per_s = bytes_per_s * len(server.workers)

    def step_ms(self, tokens: float) -> float:
        """Least time of a decode step with `tokens` in the cache, over all requests."""
        total = step_bytes(self._config, self._weight_bytes, self._kv_bytes, round(tokens))
        return total / self.bytes_per_s * 1e3


def find_limit(
    folder: Path, server: ServerInfo, gb_per_s: float | None, report: Report
) -> MemoryLimit | None:
    """With the bandwidth that was given, else as it is measured now; None for a CPU without one.

    To be called when the server is gone: it would share the GPU.
    """
    if gb_per_s:
        return MemoryLimit(folder, server, gb_per_s * 1e9)
    if not server.workers[0].device.startswith("cuda"):
        return None
    report("the memory bandwidth of the GPU", 0, 0)
    rates = run_json([sys.executable, "-m", "worker", "bench-kernels", "--roofs-only"])
    return MemoryLimit(folder, server, rates["copy_bytes_per_s"])
