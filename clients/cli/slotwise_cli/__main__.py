"""The `slotwise` program: commands, and errors as one line with an exit status.

0 success, 1 failure, 2 wrong usage, 3 no server, 4 the server refused the request, 128 + n ended by
signal n (130: Ctrl-C).
"""

import os
import sys
from contextlib import suppress
from importlib import metadata
from typing import Annotated

# Read when gRPC is imported: its event engines hand each message through two more threads.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import typer

from slotwise_client import (
    AlreadyExistsError,
    ExpiredError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    SetupDiffersError,
    SlotwiseError,
    UnauthenticatedError,
    UnavailableError,
)

from .attach import attach
from .bench import bench
from .demo import demo
from .doctor import doctor
from .gateway import gateway
from .generate import chat, generate
from .health import health
from .interrupt import Ended, end_on_hang_up
from .make_checkpoint import make_checkpoint
from .output import CliError, Output
from .prepare import prepare
from .replay import replay
from .serve import serve
from .simulate import simulate
from .top import top

_REFUSALS = (
    AlreadyExistsError,
    ExpiredError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    SetupDiffersError,
    UnauthenticatedError,
)


def build_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="slotwise",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    commands = (serve, gateway, generate, chat, attach, replay, demo, doctor, health, prepare)
    for command in (*commands, top, make_checkpoint, simulate):
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
    end_on_hang_up()
    try:
        build_app()()
    except KeyboardInterrupt:
        sys.exit(130)
    except Ended as ended:
        with suppress(OSError):  # the terminal may be gone
            Output(as_json=False).error(ended.message)
        sys.exit(ended.exit_code)
    except OSError as error:  # a full disk under a redirected stdout, say
        Output(as_json=False).error(str(error))
        sys.exit(1)
    except (CliError, SlotwiseError) as error:
        Output(as_json=False).error(error.message + _advice(error))
        sys.exit(exit_code(error))


def _advice(error: CliError | SlotwiseError) -> str:
    if isinstance(error, UnauthenticatedError):
        return " (--token-file, or SLOTWISE_TOKEN)"
    if not isinstance(error, UnavailableError) or not error.message.startswith("no answer from"):
        return ""
    if "refused" in error.message:
        return "; `slotwise serve demo` starts a server"
    # gRPC does not tell a handshake that failed from a connection that broke.
    return "; does it want TLS (--tls), or a client certificate (--tls-cert, --tls-key)?"


def exit_code(error: CliError | SlotwiseError) -> int:
    """The exit status for an error."""
    if isinstance(error, CliError):
        return error.exit_code
    if isinstance(error, UnavailableError):
        return 3
    return 4 if isinstance(error, _REFUSALS) else 1


if __name__ == "__main__":
    main()
