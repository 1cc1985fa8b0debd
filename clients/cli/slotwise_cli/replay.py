"""`slotwise replay`: run a request again from its record, and compare."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest

import typer

from slotwise_client import (
    Delta,
    Event,
    Finished,
    FinishReason,
    RecordedAnswer,
    RequestRecord,
    Stream,
)

from .connection import Connection, connects
from .interrupt import closed_by_signals
from .output import CliError, Output
from .request_options import RequestId
from .serve import JsonFlag

# How an answer ends by itself; one that was ended from outside may go on now.
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
# May be long; the ids are what was read.
_PROMPTS = ("text", "token_ids", "chat")


@dataclass(slots=True)
class _Run:
    """One answer of the new run."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@connects
def replay(request_id: RequestId, connection: Connection, as_json: JsonFlag = False) -> None:
    """Run an ended request again as it was recorded and compare it token by token.

    Exit status 1: it differs, 4: the server refused, for example since it is set up otherwise now.
    """
    output = Output(as_json)
    with (
        connection.client() as client,
        client.replay(request_id) as stream,
        closed_by_signals(stream) as interrupt,
    ):
        record, runs = _run(stream, output)
    interrupt.check()
    if record is None:
        raise CliError(f"the server told nothing of request {request_id!r}")
    difference = _difference(record, runs)
    count = sum(len(answer.token_ids) for answer in record.answers)
    if as_json:
        output.json({"record": asdict(record), "num_tokens": count, "difference": difference})
    else:
        output.line(f"differs: {difference}" if difference else f"equal: {count} tokens")
    if difference:
        raise typer.Exit(1)


def _run(
    stream: Stream[RequestRecord | Event], output: Output
) -> tuple[RequestRecord | None, list[_Run]]:
    """The record and the new answers, read until all that was recorded can be compared."""
    record: RequestRecord | None = None
    runs: list[_Run] = []
    for event in stream:
        match event:
            case RequestRecord():
                record = event
                runs = [_Run() for _ in record.answers]
                _show(record, output)
            case Delta():
                runs[event.index].token_ids += event.token_ids
            case Finished():
                runs[event.index].finish_reason = event.finish_reason
        if record is not None and all(map(_is_compared, record.answers, runs)):
            break
    return record, runs


def _is_compared(recorded: RecordedAnswer, run: _Run) -> bool:
    """Nothing that is still to come matters."""
    if recorded.finish_reason in _OWN_ENDS:
        return run.finish_reason is not None
    return run.finish_reason is not None or len(run.token_ids) >= len(recorded.token_ids)


def _difference(record: RequestRecord, runs: Sequence[_Run]) -> str | None:
    """The first one, in words; None: all that was recorded came again."""
    for index, (recorded, run) in enumerate(zip(record.answers, runs, strict=True)):
        ends = recorded.finish_reason in _OWN_ENDS
        length = None if ends else len(recorded.token_ids)
        pairs = zip_longest(recorded.token_ids, run.token_ids[:length])
        for place, (then, now) in enumerate(pairs):
            if then != now:
                was, came = _named(then), _named(now)
                return f"answer {index}, token {place} was {was} and now is {came}"
        if ends and run.finish_reason != recorded.finish_reason:
            return f"answer {index} ended by {recorded.finish_reason}, now by {run.finish_reason}"
    return None


def _named(token_id: int | None) -> str:
    return "none" if token_id is None else str(token_id)


def _show(record: RequestRecord, output: Output) -> None:
    if output.as_json:
        return
    when = datetime.fromtimestamp(record.accepted_unix_ns / 1e9, UTC)
    output.line(f"request {record.request_id}, accepted {when:%Y-%m-%d %H:%M:%S} UTC")
    output.line("set-up: " + ", ".join(f"{k} {v}" for k, v in asdict(record.setup).items()))
    output.line(f"seed {record.seed}, {len(record.prompt_token_ids)} prompt tokens")
    parameters = {k: v for k, v in record.request.items() if k not in _PROMPTS}
    output.line("parameters: " + json.dumps(parameters, ensure_ascii=False))
    for index, answer in enumerate(record.answers):
        output.line(f"answer {index}: {len(answer.token_ids)} tokens, {answer.finish_reason}")
