"""The GPU tests of the native library under NVIDIA's compute-sanitizer, many processes at once.

One tool for each call: memcheck, racecheck, synccheck or initcheck. Only our kernels are looked at.
The tests are dealt out to processes; for each file the table shows how many of them passed and what
the tool found. Exit status 0 if all passed and nothing was found, 2 if the tool is not here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
OUT = Path("build/sanitize-gpu")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Part of every mangled name; torch's kernels are not ours to look at, and there are many.
OUR_KERNELS = "kernel_substring=slotwise"
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)
OUTCOME = re.compile(r"^\S+::.* (PASSED|SKIPPED|FAILED|ERROR)\b", re.MULTILINE)


@dataclass(frozen=True)
class Piece:
    """Some tests of one file, and where what they print goes."""

    file: str
    number: int
    tests: tuple[str, ...]

    def path(self, folder: Path, suffix: str) -> Path:
        return folder / f"{self.file}.{self.number}.{suffix}"


@dataclass(frozen=True)
class Found:
    """What a piece came to. `errors` is None where the tool did not come to its end."""

    outcomes: Counter[str]
    errors: int | None

    @classmethod
    def of(cls, log: str, report: str) -> Found:
        """From what pytest printed and what the tool wrote."""
        summary = SUMMARY.search(report)
        return cls(Counter(OUTCOME.findall(log)), int(summary[1]) if summary else None)


def find_sanitizer() -> str | None:
    """Beside nvcc where it is not on the PATH."""
    nvcc = shutil.which("nvcc")
    beside = str(Path(nvcc).resolve().parent) if nvcc else ""
    folders = (os.environ.get("PATH", ""), beside, "/usr/local/cuda/bin")
    return shutil.which("compute-sanitizer", path=os.pathsep.join(filter(None, folders)))


def collect(files: list[Path], keyword: str) -> dict[str, list[str]]:
    """The tests' names by file."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-k", keyword]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    tests: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        path, found, _ = line.partition("::")
        if found:
            tests.setdefault(Path(path).stem, []).append(line)
    if not tests:
        raise SystemExit(f"error: no tests were found:\n{done.stdout}{done.stderr}")
    return tests


def deal(tests: dict[str, list[str]], num_pieces: int) -> list[Piece]:
    """Pieces of nearly the same number of tests, neighbours apart: they take as long as each other.

    Those of one file in turns, so that what is cut off is not one file alone.
    """
    size = -(-sum(map(len, tests.values())) // num_pieces)
    pieces = []
    for file, names in tests.items():
        count = -(-len(names) // size)
        pieces += [Piece(file, i, tuple(names[i::count])) for i in range(count)]
    return sorted(pieces, key=lambda piece: piece.number)


def run(
    piece: Piece, sanitizer: str, tool: str, deadline: float, stopped: threading.Event
) -> Found:
    """Runs a piece, and ends it at the deadline or once all is stopped."""
    names, log, report = (piece.path(OUT / tool, name) for name in ("tests", "log", "report"))
    names.write_text("\n".join(piece.tests))
    command = [sanitizer, "--tool", tool, "--kernel-name", OUR_KERNELS, "--log-file", str(report)]
    if tool == "memcheck":
        # torch's own calls fail on purpose here and there.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    # Every tensor in memory of its own: what is written past its end is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command.append(f"@{names}")
    if time.monotonic() < deadline and not stopped.is_set():
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )
            while process.poll() is None and time.monotonic() < deadline:
                if stopped.wait(0.1):
                    break
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    return Found.of(*(path.read_text() if path.exists() else "" for path in (log, report)))


def table(pieces: list[Piece], found: list[Found]) -> tuple[str, bool]:
    """A line for each file, and whether all is well."""
    lines, good = [], True
    for file in sorted({piece.file for piece in pieces}):
        mine = [(p, f) for p, f in zip(pieces, found, strict=True) if p.file == file]
        asked = sum(len(piece.tests) for piece, _ in mine)
        outcomes = sum((f.outcomes for _, f in mine), Counter())
        errors = sum(f.errors or 0 for _, f in mine)
        cut = sum(f.errors is None for _, f in mine)
        passed, skipped = outcomes["PASSED"], outcomes["SKIPPED"]
        good = good and passed > 0 and passed + skipped == asked and errors == cut == 0
        line = f"{file}: {passed} of {asked} tests passed, {errors} errors"
        lines.append(line + (f", {cut} of {len(mine)} processes did not end" if cut else ""))
    return "\n".join(lines), good


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--processes", type=int, default=16, help="at once, on one GPU")
    parser.add_argument("--seconds", type=float, default=3600, help="for all")
    parser.add_argument("-k", default="", dest="keyword", help="as pytest's")
    parser.add_argument("files", type=Path, nargs="*", help="default: tests/native/test_cuda_*.py")
    parsed = parser.parse_intermixed_args()
    deadline = time.monotonic() + parsed.seconds
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("error: no compute-sanitizer; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    folder = OUT / parsed.tool
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tests = collect(parsed.files or sorted(NATIVE.glob("test_cuda_*.py")), parsed.keyword)
    pieces = deal(tests, 3 * parsed.processes)
    stopped = threading.Event()
    with ThreadPoolExecutor(parsed.processes) as pool:
        try:
            found = list(
                pool.map(lambda p: run(p, sanitizer, parsed.tool, deadline, stopped), pieces)
            )
        finally:
            # After ^C, which the processes do not get: they are in sessions of their own.
            stopped.set()
    text, good = table(pieces, found)
    print(f"{parsed.tool}, logs in {folder}:\n{text}")
    for piece, result in zip(pieces, found, strict=True):
        if result.errors:
            report = piece.path(folder, "report")
            print("\n".join([f"\n{report}:", *report.read_text().splitlines()[:12]]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
