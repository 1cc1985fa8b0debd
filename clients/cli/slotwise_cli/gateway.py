"""`slotwise gateway`: the OpenAI API over HTTP, for a server that runs somewhere."""

from typing import Annotated

import typer

from .connection import DEFAULT_SERVER
from .gateway_keeper import GatewayKeeper
from .keeper import forwarding_signals
from .output import Output
from .serve import JsonFlag, server_flags


def gateway(
    server: Annotated[str, typer.Option(help="gRPC server as host:port.")] = DEFAULT_SERVER,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port, 0 takes a free one [8000].")] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="The server speaks TLS; any --tls-... says so too.")
    ] = False,
    tls_ca: Annotated[
        str | None, typer.Option(help="Who signs the server's certificate, in PEM.")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="The gateway's certificate for the server, in PEM.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its key, in PEM.")] = None,
    tls_server_name: Annotated[
        str | None, typer.Option(help="The name in the server's certificate, if another.")
    ] = None,
    https_cert: Annotated[
        str | None, typer.Option(help="Certificate chain of the HTTP port, in PEM.")
    ] = None,
    https_key: Annotated[str | None, typer.Option(help="Its key, in PEM.")] = None,
    balanced: Annotated[
        bool, typer.Option("--balanced", help="The server is a load balancer before replicas.")
    ] = False,
    insecure_tokens: Annotated[
        bool, typer.Option("--insecure-tokens", help="Tokens may go to the server without TLS.")
    ] = False,
    max_body_mb: Annotated[
        int | None, typer.Option(help="Largest request body in MiB [64].")
    ] = None,
    max_bodies_mb: Annotated[
        int | None, typer.Option(help="Bodies of all running requests in MiB [256].")
    ] = None,
    body_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a request's body [30].")
    ] = None,
    headers_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a request's headers [10].")
    ] = None,
    max_connections: Annotated[int | None, typer.Option(help="Connections at once [1024].")] = None,
    keep_alive: Annotated[
        float | None, typer.Option(help="Seconds until a silent stream says so [15].")
    ] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds that running requests get after SIGTERM [30].")
    ] = None,
    model_alias: Annotated[
        list[str] | None, typer.Option(help="Another name of the model; may be repeated.")
    ] = None,
    no_status_page: Annotated[
        bool, typer.Option("--no-status-page", help="Do not serve the page /status.")
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector of traces: http://host:port \\[off]."),
    ] = None,
    trace_sample_ratio: Annotated[
        float | None,
        typer.Option(help="Share of requests to trace, where callers do not say \\[1.0]."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    log_format: Annotated[str | None, typer.Option(help="text or json \\[text].")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve the OpenAI API over HTTP, for a server that is reached over gRPC.

    Callers' tokens are passed on to the server; for callers who bring none, there is the one in the
    variable SLOTWISE_TOKEN.
    """
    flags = server_flags(
        server=server,
        host=host,
        port=port,
        tls=tls,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_server_name=tls_server_name,
        https_cert=https_cert,
        https_key=https_key,
        balanced=balanced,
        insecure_tokens=insecure_tokens,
        max_body_mb=max_body_mb,
        max_bodies_mb=max_bodies_mb,
        body_timeout=body_timeout,
        headers_timeout=headers_timeout,
        max_connections=max_connections,
        keep_alive=keep_alive,
        grace=grace,
        no_status_page=no_status_page,
        otlp_endpoint=otlp_endpoint,
        trace_sample_ratio=trace_sample_ratio,
        log_level=log_level,
        log_format=log_format,
    )
    for alias in model_alias or ():
        flags += ["--model-alias", alias]
    keeper = GatewayKeeper(flags, Output(as_json), restarts=False)
    with forwarding_signals(keeper):
        keeper.run()
