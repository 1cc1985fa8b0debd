"""What traces cost of tokens/s: `python tests/tracing/bench_throughput.py`.

Rounds of requests that are all sampled and rounds of none, by turns, on one server with a collector
in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tracing.collector import PARENT, collecting

from slotwise_cli.demo_model import ensure_demo_model
from slotwise_cli.measure import Work, run_once
from slotwise_cli.server_process import running_server
from slotwise_client import AsyncClient


async def measure(address: str, concurrency: int, num_tokens: int, repeats: int) -> list[float]:
    """Percent of tokens/s that traces cost, over rounds that were neighbours."""
    work = Work(32, num_tokens)
    costs = []
    async with AsyncClient(address) as client:
        model = await client.model_info(timeout=60)
        for repeat in range(-1, repeats):
            prompts = work.prompts(model, concurrency, seed=repeat + 2)
            speeds = {}
            # Each round in the other order, so that drift meets both alike.
            for flags in ("00", "01") if repeat % 2 else ("01", "00"):
                traced = client.with_trace(f"00-{repeat + 2:032x}-{PARENT}-{flags}")
                speeds[flags] = (await run_once(traced, prompts, num_tokens)).tokens_per_s
            if repeat >= 0:
                costs.append(100 * (1 - speeds["01"] / speeds["00"]))
                print(f"{speeds['00']:.1f} tok/s, sampled {speeds['01']:.1f}", flush=True)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; else the demo model")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    model = asked.model or ensure_demo_model()
    with collecting() as (collector, endpoint):
        flags = ["--otlp-endpoint", endpoint, "--num-slots", str(asked.concurrency)]
        flags += ["--device", asked.device]
        with running_server(model, flags, lambda *_: None) as address:
            costs = asyncio.run(measure(address, asked.concurrency, asked.tokens, asked.repeats))
        low, _, high = quantiles(costs, n=4)
        print(
            f"traces cost {median(costs):.2f} % of tokens/s (median of {len(costs)}; half of the "
            f"rounds {low:.2f} to {high:.2f} %); {len(collector.spans)} spans came"
        )


if __name__ == "__main__":
    main()
