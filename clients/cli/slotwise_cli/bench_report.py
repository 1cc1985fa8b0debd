"""`slotwise bench report`: several results as one page."""

from pathlib import Path
from typing import Annotated

import typer

from .bench_files import ReportOption, check_files, keep
from .output import CliError
from .report import report_html
from .result_file import read_result


def join(
    results: Annotated[list[Path], typer.Argument(help="Files of --json-file, in this order.")],
    report_file: ReportOption = None,
) -> None:
    """Join results into one HTML report, with everything in it."""
    if report_file is None:
        raise CliError("--report FILE.html is needed", exit_code=2)
    check_files(None, None, report_file)
    read = [read_result(path) for path in results]
    for path, one in zip(results, read, strict=True):
        if "kind" not in one:
            raise CliError(f"{path} has no kind")
    keep(report_file, report_html(*read).encode(), {"results": read})
