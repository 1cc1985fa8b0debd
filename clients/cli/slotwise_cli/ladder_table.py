"""A ladder on the terminal."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .measure import Spread
from .output import Output


def show_ladder(result: dict[str, Any], output: Output) -> None:
    """A line per concurrency; the engine, the limit and the peer where they were measured."""
    # A worker on a GPU has none.
    threads = f"{result['num_threads']} threads; " if result["num_threads"] else ""
    output.line(
        f"{result['model']}, {result['device']}, {result['weight_dtype']}, TP {result['tp']}, "
        f"{threads}{result['prompt_tokens']} prompt + "
        f"{result['new_tokens']} new tokens per request, median of {result['repeats']}"
    )
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="tok/s with prefill; of decode alone, while all decode; and by difference, as "
        "other engines are measured: n (tokens - 1) / (time of all tokens - time of one each); "
        "TTFT p50, ITL p50 and p99 in ms; time: of the server over the engine's; limit: tok/s that "
        "memory allows",
    )
    heads = ["n", "tok/s", "+-", "x", "decode", "x", "by diff", "x"]
    heads += ["TTFT", "ITL", "p99", "prefill"]
    if "grpc_time_ratio" in result["levels"][0]:
        heads += ["engine", "time"]
    if "limit_tokens_per_s" in result["levels"][0]:
        heads += ["limit"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for level in result["levels"]:
        table.add_row(*_row(level))
    output.table(table)
    if idle := result.get("idle_between_steps_us"):
        output.line(
            f"the GPU was idle between two steps for {idle['median']:.1f} us (median), "
            f"{idle['percentile_99']:.1f} us (99 %)"
        )
    if "peer" in result:
        peer = result["peer"]
        ratio = f"; Slotwise at n=1: {peer['ratio_at_one']:.2f}x" if "ratio_at_one" in peer else ""
        output.line(f"{peer['name']}: {peer['tokens_per_s']['median']:.1f} tok/s{ratio}")


def _row(level: dict[str, Any]) -> list[str]:
    speed = Spread(**level["tokens_per_s"])
    difference = level["difference_tokens_per_s"]
    cells = [
        str(level["concurrency"]),
        f"{speed.median:.1f}",
        f"{speed.percent:.0f}%",
        _times(level["ratio_to_one"]),
        f"{level['decode_tokens_per_s']['median']:.1f}",
        _times(level["decode_ratio_to_one"]),
        "-" if difference is None else f"{difference['median']:.1f}",
        _times(level["difference_ratio_to_one"]),
        f"{level['ttft_ms_p50']:.1f}",
        f"{level['itl_ms_p50']:.2f}",
        f"{level['itl_ms_p99']:.2f}",
        f"{level['prefill_share'] * 100:.0f}%",
    ]
    if "grpc_time_ratio" in level:
        cells.append(f"{level['in_process_tokens_per_s']['median']:.1f}")
        cells.append(f"{level['grpc_time_ratio']:.3f}")
    if "limit_tokens_per_s" in level:
        cells.append(f"{level['limit_tokens_per_s']:.0f}")
    return cells


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
