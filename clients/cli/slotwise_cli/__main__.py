"""The `slotwise` program: commands, and errors as one line with an exit status.

0 success, 1 failure, 2 wrong usage, 3 no server, 4 the server refused the request, 130 Ctrl-C.
"""

import os
import sys
from importlib import metadata
from typing import Annotated

# Read when gRPC is imported: its event engines hand each message through two more threads.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import typer

from slotwise_client import InvalidArgumentError, SlotwiseError, UnavailableError

from .bench import bench
from .demo import demo
from .doctor import doctor
from .generate import chat, generate
from .make_checkpoint import make_checkpoint
from .output import CliError, Output
from .serve import serve


def build_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="slotwise",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for command in (serve, generate, chat, demo, doctor, make_checkpoint):
        app.command()(command)
    app.add_typer(bench, name="bench")
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print("slotwise", metadata.version("slotwise"))
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Serve a language model over gRPC, and talk to it."""


def main() -> None:
    """Entry point of the console script."""
    try:
        build_app()()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:  # a full disk under a redirected stdout, say
        Output(as_json=False).error(str(error))
        sys.exit(1)
    except (CliError, SlotwiseError) as error:
        Output(as_json=False).error(error.message + _advice(error))
        sys.exit(exit_code(error))


def _advice(error: CliError | SlotwiseError) -> str:
    if isinstance(error, UnavailableError) and error.message.startswith("no answer from"):
        return "; `slotwise serve demo` starts a server"
    return ""


def exit_code(error: CliError | SlotwiseError) -> int:
    """The exit status for an error."""
    if isinstance(error, CliError):
        return error.exit_code
    if isinstance(error, UnavailableError):
        return 3
    return 4 if isinstance(error, InvalidArgumentError) else 1


if __name__ == "__main__":
    main()
