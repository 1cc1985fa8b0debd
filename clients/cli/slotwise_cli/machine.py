"""What was measured on: this machine, and the server as it describes itself."""

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slotwise_client import ModelInfo, ServerInfo

from .gpus import NoDriverError, find_gpus


def machine_of(device: str) -> dict[str, Any]:
    """This one; a server elsewhere says only its device."""
    cpus = [
        line.partition(":")[2].strip()
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith("model name")
    ]
    machine: dict[str, Any] = {
        "cpu": cpus[0] if cpus else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
    }
    if device.startswith("cuda"):
        try:
            machine["gpus"] = [card.name for card in find_gpus().cards]
        except NoDriverError as error:
            machine["gpus"] = [f"not known: {error}"]
    return machine


def setup_of(model: ModelInfo, server: ServerInfo) -> dict[str, Any]:
    """What the figures depend on; two results of different ones are not of the same thing."""
    worker = server.workers[0]
    return {
        "version": server.version,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "device": worker.device,
        "weight_dtype": worker.weight_dtype,
        "kv_dtype": worker.kv_dtype,
        "tp": len(server.workers),
        "num_threads": worker.num_threads,
        "num_slots": server.num_slots,
        "max_running": server.max_running,
        "max_seq_len": server.max_seq_len,
        "max_queue_len": server.max_queue_len,
        "max_step_tokens": server.max_step_tokens,
        "prefix_reuse": server.prefix_reuse,
        "server": asdict(server.setup),
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
