"""The `slotwise` program: commands, and errors as one line with an exit status.

0 success, 1 failure, 2 wrong usage, 3 no server, 4 the server refused the request, 130 Ctrl-C.
"""

import sys

import typer

from slotwise_client import InvalidArgumentError, SlotwiseError, UnavailableError

from .bench import bench
from .demo import demo
from .doctor import doctor
from .generate import chat, generate
from .output import CliError, Output
from .serve import serve


def build_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="slotwise",
        help="Serve a language model over gRPC, and talk to it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (serve, generate, chat, demo, doctor):
        app.command()(command)
    app.add_typer(bench, name="bench")
    return app


def main() -> None:
    """Entry point of the console script."""
    try:
        build_app()()
    except KeyboardInterrupt:
        sys.exit(130)
    except (CliError, SlotwiseError) as error:
        Output(as_json=False).error(error.message)
        sys.exit(exit_code(error))


def exit_code(error: CliError | SlotwiseError) -> int:
    """The exit status for an error."""
    if isinstance(error, CliError):
        return error.exit_code
    if isinstance(error, UnavailableError):
        return 3
    return 4 if isinstance(error, InvalidArgumentError) else 1


if __name__ == "__main__":
    main()
