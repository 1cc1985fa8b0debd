"""`slotwise health`: whether a server, or a part of it, answers requests. Health checks of
containers run it as `python -m slotwise_cli.health`, which loads less."""

import os
from typing import Annotated

# Read when gRPC is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import typer

from slotwise_client import DeadlineError, Health, UnavailableError

from .connection import Connection, connects
from .output import CliError, Output


@connects
def health(
    connection: Connection,
    service: Annotated[
        str,
        typer.Option(
            help="slotwise.v1.Inference: it answers requests; slotwise.worker/RANK: that rank "
            "does; empty: the process lives."
        ),
    ] = "slotwise.v1.Inference",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Ask the server's health once. Exit code 0: serving, 1: not, 3: no answer."""
    output = Output(as_json)
    try:
        with connection.client() as client:
            state = client.health(service, timeout=timeout)
    except (UnavailableError, DeadlineError) as error:
        output.error(error.message)
        raise typer.Exit(3) from None
    except CliError as error:
        output.error(error.message)
        raise typer.Exit(error.exit_code) from None
    if as_json:
        output.json({"server": connection.server, "service": service, "health": state})
    else:
        output.line(state)
    if state is not Health.SERVING:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(health)
