"""The options of every command that talks to a running server, read in one place."""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from slotwise_client import Client, TlsOptions

from .output import CliError

DEFAULT_SERVER: Final = "127.0.0.1:50051"
# A token on the command line could be read by every user of the machine.
TOKEN_VARIABLE: Final = "SLOTWISE_TOKEN"


@dataclass(frozen=True, slots=True)
class Connection:
    """A server, and how it is reached."""

    server: str
    tls: TlsOptions | bool = False
    token: str | None = None
    insecure_token: bool = False

    def client(self) -> Client:
        """CliError (exit 2) for a certificate or a token that cannot be used."""
        try:
            return Client(
                self.server,
                tls=self.tls,
                token=self.token,
                insecure_token=self.insecure_token,
            )
        except ValueError as error:
            message = str(error).replace("insecure_token=True", "--insecure-token")
            raise CliError(message, exit_code=2) from error


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `_connection` in place of its parameter `connection`."""
    signature = inspect.signature(command)
    options = list(inspect.signature(_connection).parameters.values())

    @functools.wraps(command)
    def run(**values: Any) -> None:
        mine = {option.name: values.pop(option.name) for option in options}
        command(connection=_connection(**mine), **values)

    kept = [one for one in signature.parameters.values() if one.name != "connection"]
    # typer reads these.
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*kept, *options)]
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _connection(
    server: Annotated[str, typer.Option(help="Server as host:port.")] = DEFAULT_SERVER,
    tls: Annotated[
        bool, typer.Option("--tls", help="The server speaks TLS; any --tls-... says so too.")
    ] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Who signs the server's certificate, in PEM.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Your certificate, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, in PEM.")] = None,
    tls_server_name: Annotated[
        str | None, typer.Option(help="The name in the server's certificate, if another.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File of your token \\[the variable {TOKEN_VARIABLE}].")
    ] = None,
    insecure_token: Annotated[
        bool, typer.Option("--insecure-token", help="Send it also without TLS.")
    ] = False,
) -> Connection:
    options = TlsOptions(tls_ca, tls_cert, tls_key, tls_server_name)
    with_tls: TlsOptions | bool = tls if options == TlsOptions() else options
    return Connection(server, with_tls, _token(token_file), insecure_token)


def _token(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"--token-file {file}: {error}", exit_code=2) from error
