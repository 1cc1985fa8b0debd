"""`make bench-gpu`: the ladder with its targets beside, then kernels and steps.

Random weights in the cache folder, made once. JSON and plots go to build/bench-gpu.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotwise_cli.demo_model import cache_dir
from slotwise_cli.gpus import NoDriverError, find_gpus

OUT = Path("build/bench-gpu")
CONCURRENCY = (1, 2, 4, 8)
# Key of the time to first token, in ms, of requests that come one after another. In the ladder one
# request follows eight at once, on a card so hot that its clock is lower.
ALONE = "alone_ttft_ms_p50"


@dataclass(frozen=True)
class Target:
    """What is asked of one ladder, and what vLLM 0.24 did on the same card."""

    model: str
    prompt_tokens: int
    tp: int
    tokens_per_s: tuple[int, ...]
    vllm: tuple[int, ...]
    ttft_ms: float | None = None
    ratios: tuple[tuple[int, float], ...] = ()

    @property
    def name(self) -> str:
        """For files and the table."""
        return f"{self.model}-tp{self.tp}-{self.prompt_tokens}"


TARGETS = (
    Target(
        "qwen3-8b",
        512,
        1,
        (213, 420, 825, 1600),
        (193, 380, 737, 1429),
        ttft_ms=15,
        ratios=((2, 1.95), (8, 7.2)),
    ),
    Target("qwen3-8b", 8192, 1, (203, 385, 690, 1120), (183, 348, 620, 1037), ttft_ms=215),
    Target("qwen3-0.6b", 512, 1, (800, 1550, 3000, 5500), (605, 1122, 1704, 3502)),
    Target("qwen3-8b", 512, 2, (330, 650, 1250, 2300), (263, 527, 1038, 1978)),
)
GRPC_TIME_RATIO = 1.05


@dataclass(frozen=True)
class Line:
    """One figure beside its target."""

    what: str
    figure: float
    target: float
    at_most: bool = False
    note: str = ""

    @property
    def reached(self) -> bool:
        """Whether the figure is on the right side of the target."""
        return self.figure <= self.target if self.at_most else self.figure >= self.target


def lines(target: Target, ladder: dict[str, Any]) -> list[Line]:
    """The figures of a ladder's JSON that have a target."""
    found = []
    levels = {level["concurrency"]: level for level in ladder["levels"]}
    for count, least, vllm in zip(CONCURRENCY, target.tokens_per_s, target.vllm, strict=True):
        speed = levels[count]["difference_tokens_per_s"]
        spread = f"{speed['min']:.1f} to {speed['max']:.1f}; vLLM {vllm}"
        found.append(Line(f"n={count} decode tok/s", speed["median"], least, note=spread))
    for count, least in target.ratios:
        found.append(Line(f"n={count} ratio", levels[count]["difference_ratio_to_one"], least))
    one = levels[1]
    if target.ttft_ms is not None:
        found.append(Line("first token, ms", ladder[ALONE], target.ttft_ms, at_most=True))
    if "grpc_time_ratio" in one:
        ratio = one["grpc_time_ratio"]
        found.append(Line("time over the engine's", ratio, GRPC_TIME_RATIO, at_most=True))
    return found


def table(target: Target, ladder: dict[str, Any]) -> str:
    """For people."""
    heading = f"{target.model}, TP {target.tp}, {target.prompt_tokens} prompt + "
    rows = [f"{heading}{ladder['new_tokens']} new tokens, {ladder['device']}"]
    for line in lines(target, ladder):
        sign = "<=" if line.at_most else ">="
        mark = "ok    " if line.reached else "MISSED"
        row = f"  {mark} {line.what:24}{line.figure:10.2f}  {sign} {line.target:g}"
        rows.append(row + (f"  ({line.note})" if line.note else ""))
    return "\n".join(rows)


def checkpoint(name: str) -> Path:
    """A folder of random weights in the shape of `name`, made when it is missing."""
    folder = cache_dir() / "models" / f"random-{name}"
    if not folder.is_dir():
        slotwise("make-checkpoint", "--like", name, str(folder))
    return folder


def slotwise(*words: str) -> None:
    """Run the command; its output goes where ours goes."""
    subprocess.run([sys.executable, "-m", "slotwise_cli", *words], check=True)


def measure(target: Target, repeats: int) -> dict[str, Any]:
    """The ladder, and ALONE where it has a target; JSON and plots go to OUT."""
    ladder = run_ladder(target, CONCURRENCY, repeats, target.name)
    if target.ttft_ms is not None:
        alone = run_ladder(target, (1,), 3 * repeats, f"{target.name}-alone")
        ladder[ALONE] = alone["levels"][0]["ttft_ms_p50"]
    return ladder


def run_ladder(
    target: Target, concurrency: tuple[int, ...], repeats: int, name: str
) -> dict[str, Any]:
    """The JSON of one ladder."""
    files = {kind: str(OUT / f"ladder-{name}.{kind}") for kind in ("json", "png")}
    words = ["bench", "ladder", "--model", str(checkpoint(target.model)), "--device", "cuda"]
    words += ["--prompt-tokens", str(target.prompt_tokens), "--output-tokens", "128"]
    words += ["--concurrency", ",".join(map(str, concurrency)), "--repeats", str(repeats)]
    words += ["--json-file", files["json"], "--plot", files["png"]]
    words += ["--tp", str(target.tp)] if target.tp > 1 else []
    slotwise(*words)
    ladder: dict[str, Any] = json.loads(Path(files["json"]).read_text())
    return ladder


def main() -> int:
    """0 when everything ran, whatever the figures; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="ladders whose name contains this")
    parser.add_argument("--ladders-only", action="store_true", help="no kernels, no steps")
    parsed = parser.parse_args()
    try:
        cards = find_gpus().cards
    except NoDriverError as error:
        print(f"error: {error}: make bench-gpu needs an NVIDIA GPU", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    chosen = [target for target in TARGETS if parsed.only in target.name]
    tables = []
    for target in chosen:
        if target.tp > len(cards):
            tables.append(f"{target.name}: left out, {len(cards)} GPUs here")
        else:
            tables.append(table(target, measure(target, parsed.repeats)))
    if not parsed.ladders_only:
        slotwise("bench", "kernels", "--json-file", str(OUT / "kernels.json"))
        words = ["bench", "steps", "--model", str(checkpoint("qwen3-8b")), "--device", "cuda"]
        files = ["--json-file", str(OUT / "steps.json"), "--plot", str(OUT / "steps.png")]
        slotwise(*words, *files)
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)
