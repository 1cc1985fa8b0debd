"""`slotwise demo`: everything once, from the model to an answer, with nothing left behind."""

import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

import typer

from slotwise_client import Client, Delta, Finished

from .demo_model import ensure_demo_model
from .output import Output
from .serve import JsonFlag
from .server_process import running_server

QUESTION = "What is the capital of France?"


def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    as_json: JsonFlag = False,
) -> None:
    """Get the demo model, serve it on a free port, ask a question, stream the answer, stop."""
    output = Output(as_json)
    started = time.monotonic()
    with ExitStack() as stack:
        with output.progress() as report:
            model = ensure_demo_model(report)
            server = running_server(model, ["--max-seq-len", "2048"], report)
            address = stack.enter_context(server)
        output.note(f"{model.name} is ready on {address} after {time.monotonic() - started:.1f} s")
        result = _ask(address, question, output)
    if as_json:
        output.json(result)
        return
    output.line(
        f"\ntime to first token {result['time_to_first_token_ms']:.0f} ms, "
        f"{result['tokens_per_second']:.1f} tokens/s "
        f"({result['usage']['prompt_tokens']} prompt tokens, "
        f"{result['usage']['completion_tokens']} generated)"
    )


def _ask(address: str, question: str, output: Output) -> dict[str, Any]:
    """Ask, show the answer as it comes, and measure it at this end of the wire."""
    if not output.as_json:
        output.line(f"\n> {question}\n")
    sent = time.monotonic()
    arrivals: list[tuple[float, int]] = []
    text = ""
    finished: Finished | None = None
    with Client(address) as client:
        for event in client.chat(question, temperature=0, max_new_tokens=128, timeout=300):
            if isinstance(event, Delta):
                arrivals.append((time.monotonic(), len(event.token_ids)))
                text += event.text
                if not output.as_json:
                    output.text(event.text)
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None, "the stream ended without Finished or an error"
    if not output.as_json:
        output.text("\n")
    first, last = arrivals[0][0], arrivals[-1][0]
    after_first = sum(count for _, count in arrivals) - arrivals[0][1]
    return {
        "question": question,
        "text": text,
        "finish_reason": finished.finish_reason,
        "usage": asdict(finished.usage),
        "time_to_first_token_ms": (first - sent) * 1e3,
        "tokens_per_second": after_first / (last - first) if last > first else 0.0,
    }
