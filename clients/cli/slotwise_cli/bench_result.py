"""The end of a benchmark: its result is shown and kept, whole or marked as incomplete."""

from pathlib import Path
from typing import Any

from slotwise_client import ModelInfo, ServerInfo, SlotwiseError

from .bench_files import keep, write_json_file
from .figures import Figure
from .interrupt import Ended
from .machine import machine_of, setup_of
from .output import CliError, Output
from .report import report_html, result_picture
from .result_file import result_head


def common_form(
    kind: str,
    model: ModelInfo,
    server: ServerInfo,
    plan: dict[str, Any],
    result: dict[str, Any],
) -> dict[str, Any]:
    """A kind's own result with what every result has."""
    machine = machine_of(server.workers[0].device)
    return {**result_head(kind, machine, setup_of(model, server)), **result, "plan": plan}


def end_with(
    result: dict[str, Any],
    output: Output,
    json_file: Path | None,
    plot: Path | None,
    report: Path | None,
    ended_by: BaseException | None = None,
) -> None:
    """Write the files, then raise what ended the measuring early, if anything did.

    `figures` may still be objects.
    """
    result["figures"] = {
        name: one.as_json() if isinstance(one, Figure) else one
        for name, one in result["figures"].items()
    }
    if ended_by is not None:
        result["complete"] = False
        result["incomplete_because"] = _reason(ended_by)
        output.note(f"incomplete: {_reason(ended_by)}; what was measured until then is kept")
    if output.as_json:
        output.json(result)
    write_json_file(json_file, result)
    if plot is not None and (picture := result_picture(result)) is not None:
        keep(plot, picture, result)
    if report is not None:
        keep(report, report_html(result).encode(), result)
    if ended_by is not None:
        raise ended_by


def _reason(error: BaseException) -> str:
    if isinstance(error, SlotwiseError):
        return error.message
    if isinstance(error, Ended | CliError):
        return error.message
    return "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
