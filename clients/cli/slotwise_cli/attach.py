"""`slotwise attach`: read a request on that another connection began."""

from typing import Annotated

import typer

from .answer import answers_for, follow, show
from .connection import Connection, connects
from .interrupt import closed_by_signals
from .output import Output
from .request_options import RequestId
from .serve import JsonFlag


@connects
def attach(
    request_id: RequestId,
    connection: Connection,
    begins: Annotated[
        list[int] | None,
        typer.Option("--from", min=0, help="First token to read; repeat it for further answers."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Read a request on, while it runs and for a while after. Ctrl-C cancels it."""
    output = Output(as_json)
    first, *others = begins or [0]
    answers = answers_for(1 + len(others))
    with (
        connection.client() as client,
        client.attach(request_id, first, others) as stream,
        closed_by_signals(stream) as interrupt,
    ):
        follow(stream, output, answers)
    interrupt.check()
    show(answers, output)
