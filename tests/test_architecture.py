"""The rule of dependencies, by the imports in the source.

clients -> protos <- scheduler_service, worker -> protos, and few files -> the native library.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

STDLIB_ONLY = {
    "errors",
    "integrity",
    "latencies",
    "limits",
    "prefix_index",
    "prefix_plan",
    "request",
    "request_queue",
    "scheduler",
    "seat",
    "slots",
    "step",
    "step_plan",
    "trial",
}
PROTO_BORDER = {
    "scheduler_service": {"server", "messages", "worker_link", "worker_messages"},
    "worker": {"server"},
}
PARTS = (
    "scheduler_service",
    "worker",
    "clients/python/slotwise_client",
    "clients/cli/slotwise_cli",
    "clients/openai_gateway/slotwise_gateway",
)
CODE_FORMATS = {
    *("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"),
    # They send pickles.
    "multiprocessing",
    "yaml",
}
CODE_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
    *("np.load", "numpy.load", "runpy.run_path", "runpy.run_module"),
    # Of torch.distributed: pickles between ranks.
    *("dist.all_gather_object", "dist.broadcast_object_list", "dist.gather_object"),
    *("dist.scatter_object_list", "dist.send_object_list", "dist.recv_object_list"),
}
# Where ids come in: looked through at once, not one by one.
NUMPY_USERS = {"messages", "prompts"}
NATIVE_USERS = {
    "attention",
    "bench_kernels",
    "cpu_backend",
    "cuda_backend",
    "cuda_runner",
    "cuda_slots",
    "gpu",
    "kernel_cases",
    "peers",
    # How the library was built.
    "rank",
    "sampler",
}


def imported_modules(path: Path) -> set[str]:
    """Full names of what a file imports, inside functions too; relative names made absolute."""
    package = path.parent.name
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            prefix = f"{package}.{base}".rstrip(".") if node.level else base
            names.add(prefix)
            names.update(f"{prefix}.{alias.name}" for alias in node.names)
    return names


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no source in {folder}"
    return files


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path)}


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("scheduler_service", {"torch", "worker", "slotwise_client", "slotwise_cli"}),
        ("worker", {"scheduler_service", "slotwise_client", "slotwise_cli"}),
        (
            "clients/python/slotwise_client",
            {"scheduler_service", "worker", "slotwise_cli", "torch"},
        ),
        ("clients/cli/slotwise_cli", {"scheduler_service", "worker"}),
        (
            "clients/openai_gateway/slotwise_gateway",
            {"scheduler_service", "worker", "slotwise_cli", "torch"},
        ),
    ],
)
def test_a_part_imports_only_what_it_may(folder, forbidden):
    found = {path.name: roots(path) & forbidden for path in sources(folder)}
    assert not {name: bad for name, bad in found.items() if bad}


def test_the_core_of_the_scheduler_needs_only_the_standard_library():
    allowed = set(sys.stdlib_module_names) | {"scheduler_service"}
    for path in sources("scheduler_service"):
        if path.stem in STDLIB_ONLY:
            assert roots(path) <= allowed, path
            own = {
                n.split(".")[1]
                for n in imported_modules(path)
                if n.startswith("scheduler_service.")
            }
            assert own <= STDLIB_ONLY, f"{path} leans on the shell: {own - STDLIB_ONLY}"
            assert "asyncio" not in roots(path), path
            assert "time" not in roots(path), f"{path}: time comes in as an argument"


@pytest.mark.parametrize("folder", ["scheduler_service", "worker"])
def test_generated_types_stop_at_the_border(folder):
    for path in sources(folder):
        messages = {n for n in imported_modules(path) if n.startswith("slotwise.") and "_pb2" in n}
        assert not messages or path.stem in PROTO_BORDER[folder], f"{path} imports {messages}"


def test_no_file_reads_what_could_run():
    """Formats whose reading runs code, and ways to run a text."""
    for folder in PARTS:
        for path in sources(folder):
            assert not roots(path) & CODE_FORMATS, path
            found = {called(node) for node in ast.walk(ast.parse(path.read_text()))}
            assert not found & CODE_CALLS, f"{path} calls {found & CODE_CALLS}"


def called(node: ast.AST) -> str:
    """The name of what a node calls; "" when it is no call."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name.removeprefix("builtins.")


def test_ways_to_run_what_was_read_are_found():
    text = "eval(x); builtins.exec(x); torch.load(x); model.eval()"
    names = {called(node) for node in ast.walk(ast.parse(text))}
    assert names & CODE_CALLS == {"eval", "exec", "torch.load"}


def test_few_files_of_the_scheduler_know_numpy():
    users = {p.stem for p in sources("scheduler_service") if "numpy" in roots(p)}
    assert users <= NUMPY_USERS


def test_few_files_know_the_native_library():
    users = {p.stem for p in sources("worker") if "worker._native" in imported_modules(p)}
    assert users <= NATIVE_USERS


def test_the_public_proto_never_imports_the_internal_one():
    public = (ROOT / "protos/slotwise/v1/inference.proto").read_text().splitlines()
    assert not [line for line in public if line.startswith("import") and "worker" in line]


def test_every_cuda_source_is_built():
    named = set(re.findall(r"src/cuda/(\w+\.cu)\b", (ROOT / "native/cuda.cmake").read_text()))
    assert named == {path.name for path in (ROOT / "native/src/cuda").glob("*.cu")}


def test_every_kernel_launch_names_its_stream():
    for path in (ROOT / "native").rglob("*.cu*"):
        for launch in re.findall(r"<<<(.*?)>>>", path.read_text(), re.S):
            assert launch.count(",") >= 3, f"{path}: <<<{launch}>>> has no stream"
