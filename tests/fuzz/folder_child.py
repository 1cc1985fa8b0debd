"""Opens damaged folders as the worker and the front do, in a process of its own: `python -m
fuzz.folder_child SEED BEGIN END`.

It says each number before its turn comes, and at the end what came out, as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz.folders import INDEX, JSON_FILES, SHARDS, TEMPLATE, WEIGHTS, FolderMaker, write_folder
from fuzz.report import resident_bytes

from scheduler_service.chat_template import ChatTemplate
from scheduler_service.errors import InvalidArgumentError
from scheduler_service.json_file import ModelFilesError
from scheduler_service.service import load_model
from worker.errors import CheckpointError, SetupError
from worker.rank import Rank, RankSetup

# For one folder; then the process says where it stands, and ends.
TIME_LIMIT_S = 300
# Beyond what is mapped once a good folder was opened.
MEMORY_LIMIT_BYTES = 2 << 30
# Of an error: it has to fit a status, with room for the words around it.
MAX_WORDS = 2000
WORKER_FILES = {"config.json", INDEX, WEIGHTS, *SHARDS}
FRONT_FILES = {*JSON_FILES, TEMPLATE}
NAMES = (*JSON_FILES, TEMPLATE, INDEX, WEIGHTS, *SHARDS)
MESSAGES = [{"role": "user", "content": "hi"}]


def open_by_worker(folder: Path) -> str:
    """Checks, loads and tests itself, as before a first step."""
    rank = Rank(folder, 1, "cpu")
    try:
        rank.configure(RankSetup(1, num_slots=1, max_seq_len=8), lambda *_: None, lambda: False)
    except CheckpointError as error:
        return checked("worker refuses", folder, error)
    except SetupError:
        # The checkpoint is good; what it asks for is not to be had.
        return "worker cannot set up"
    finally:
        rank.release()
    return "worker loads"


def open_by_front(folder: Path) -> str:
    """Reads it all, and renders a chat."""
    try:
        model = load_model(folder, "")
    except ModelFilesError as error:
        return checked("front refuses", folder, error)
    model.constraints.close()
    try:
        if model.info.chat_template is not None:
            template = ChatTemplate(model.info.chat_template, model.info.special_tokens)
            template.render(MESSAGES, add_generation_prompt=True, variables={})
    except InvalidArgumentError:
        return "front loads, template refuses"
    return "front loads"


def checked(outcome: str, folder: Path, error: Exception) -> str:
    words = str(error)
    words.encode()
    if len(words) > MAX_WORDS:
        return f"FAULT {outcome} in {len(words)} characters: {words[:200]}"
    if not any(name in words for name in (*NAMES, str(folder), "chat template")):
        return f"FAULT {outcome} and names no file: {words[:300]}"
    return outcome


def try_folder(folder: Path, changed: set[str]) -> list[str]:
    """Of who reads a changed file, how that ends."""
    outcomes = []
    for opened, files in ((open_by_worker, WORKER_FILES), (open_by_front, FRONT_FILES)):
        if not changed & files:
            continue
        try:
            outcomes.append(opened(folder))
        except BaseException as error:
            outcomes.append(f"FAULT {opened.__name__}: {type(error).__name__}: {error!s:.300}")
    return outcomes


def main(seed: int, begin: int, end: int) -> None:
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    slowest = (0.0, "")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        maker, folder = FolderMaker(seed, Path(scratch)), Path(scratch, "model")
        try_folder(Path(scratch, "whole"), set(NAMES))
        limit_memory()
        before = 0
        for number in range(begin, end):
            print(number, flush=True)
            faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
            damage = maker.damage(number)
            write_folder(folder, maker.good_files(damage), damage)
            started = time.monotonic()
            for outcome in try_folder(folder, set(damage.files) | set(damage.specials)):
                is_fault = outcome.startswith("FAULT")
                outcomes["fault" if is_fault else outcome] += 1
                if is_fault:
                    faults.append(f"{outcome} - {damage!s:.400}")
            slowest = max(slowest, (time.monotonic() - started, f"{damage!s:.150}"))
            if number == begin + (end - begin) // 4:
                gc.collect()
                before = resident_bytes()
        faulthandler.cancel_dump_traceback_later()
    gc.collect()
    note = f"slowest: {slowest[0]:.2f} s, {slowest[1]}"
    growth = resident_bytes() - before
    found = {"outcomes": outcomes, "faults": faults, "growth_bytes": growth, "notes": [note]}
    print(json.dumps(found), flush=True)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
