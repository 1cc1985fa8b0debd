"""`make chaos`: random kill -9 of ranks and of the scheduler, under streams, on the demo model.

Exits with 1 when a token was lost, doubled or changed, or another promise was broken.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos.chaos import (
    FLAGS,
    Chaos,
    chaos_on,
    kill_all_ranks,
    kill_rank,
    kill_scheduler,
    kill_scheduler_and_rank,
    watchdog,
)
from chaos.probes import growth
from chaos.readers import make_requests
from chaos.report import Report, spread
from chaos.service import Service
from slotwise_cli.demo_model import ensure_demo_model

# Faults by how often of 100 they come.
MIX = {kill_rank: 60, kill_all_ranks: 5, kill_scheduler: 25, kill_scheduler_and_rank: 10}
# A kill comes so long after the first new token, at most: now and then before all streams go on,
# which do so one after another.
PAUSE_S = 8.0
BOUND_S = 4 * 3600


def main() -> int:
    asked = _arguments()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 32)
    model = Path(asked.model) if asked.model else ensure_demo_model()
    report = Report("chaos")
    watchdog(BOUND_S, "chaos").start()
    # Who stops it gets the report of what was done.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        service = Service(
            model, Path(folder), (*FLAGS, "--num-slots", "8", "--max-seq-len", "1024")
        )
        requests = make_requests(random.Random(seed), 2 * asked.streams, range(40, 160))
        began = time.monotonic()
        chaos = None
        try:
            with chaos_on(service, asked.streams, seed, requests, num_by_client=2) as chaos:
                report.strikes = chaos.log
                _strike(chaos, asked.kills)
        except KeyboardInterrupt:
            report.facts["stopped after"] = f"{len(report.strikes)} of {asked.kills} kills"
        except AssertionError as error:
            print(error)
            report.facts["failed"] = str(error)[:2000]
            (asked.out / "scheduler.log").parent.mkdir(parents=True, exist_ok=True)
            (asked.out / "scheduler.log").write_text(service.log_file.read_text())
        report.facts |= {"seed": seed, "model": model.name, "streams": asked.streams}
        report.facts["minutes"] = round((time.monotonic() - began) / 60, 1)
        report.facts |= told(chaos)
    report.write(asked.out)
    print(report)
    return 1 if "failed" in report.facts else 0


def _strike(chaos: Chaos, kills: int) -> None:
    for _ in range(kills):
        time.sleep(chaos.rng.uniform(0, PAUSE_S))
        (fault,) = chaos.rng.choices(list(MIX), list(MIX.values()))
        chaos.strike(fault)


def told(chaos: Chaos | None) -> dict[str, object]:
    """What the readers and the probes have seen; nothing when it never came so far."""
    if chaos is None:
        return {}
    tally = chaos.readers.tally
    return {
        "streams ended": tally.num_ended,
        "tokens compared": chaos.readers.progress.num_tokens,
        "lost, doubled or changed": len(chaos.readers.faults),
        "tries to read on, while the server was away too": tally.num_reconnects,
        "starts of the scheduler": chaos.service.num_starts,
        "liveness answers, s": spread(chaos.probes.liveness_s or [0]),
        "memory": growth(chaos.probes.memory),
        "statuses of broken connections": dict(tally.broken.most_common(8)),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, help="of faults and requests; default: random")
    parser.add_argument("--model", help="a checkpoint folder; default: the demo model")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
