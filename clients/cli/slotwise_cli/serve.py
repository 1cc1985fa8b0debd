"""`slotwise serve`: start the scheduler, show its progress, say when it is ready, end with it."""

from pathlib import Path
from typing import Annotated

import typer

from .demo_model import ensure_demo_model
from .gateway_keeper import GatewayKeeper, check_port
from .keeper import Keeper, forwarding_signals
from .output import CliError, Output, Report
from .ray_launcher import running_ray_workers

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ModelArgument = Annotated[str, typer.Argument(help="A checkpoint folder, or `demo`.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda \\[auto].")]
TpOption = Annotated[int | None, typer.Option(help="Tensor-parallel ranks [1].")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads per rank on the CPU.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="Weights in memory: auto, float32, bfloat16 or float16.")
]


def model_folder(model: str, report: Report) -> Path:
    """The folder to serve: the demo model by name, else an existing folder."""
    if model == "demo":
        return ensure_demo_model(report)
    folder = Path(model)
    if not folder.is_dir():
        raise CliError(f"no folder {model!r}; give a checkpoint folder, or `demo`")
    return folder.resolve()


def serve(
    model: ModelArgument,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port, 0 takes a free one [50051].")] = None,
    device: DeviceOption = None,
    tp: TpOption = None,
    num_slots: Annotated[
        int | None, typer.Option(help="Seats with a KV cache; spare ones keep prefixes [8].")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Requests that run at once \\[num-slots].")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Prompt and answer together, in tokens.")
    ] = None,
    dtype: DtypeOption = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="KV cache: auto, float32, bfloat16 or float16.")
    ] = None,
    max_queue_len: Annotated[int | None, typer.Option(help="Requests that may wait [256].")] = None,
    max_waiting_per_client: Annotated[
        int | None, typer.Option(help="Requests of one client that may wait, 0: no bound \\[0].")
    ] = None,
    fair_share: Annotated[
        bool,
        typer.Option("--fair-share", help="Share the slots evenly among clients that wait."),
    ] = False,
    threads: ThreadsOption = None,
    served_name: Annotated[str | None, typer.Option(help="Name; else the folder's.")] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds that running requests get after SIGTERM [30].")
    ] = None,
    standby_workers: Annotated[
        int | None, typer.Option(help="Processes that wait to replace a lost worker [1 on GPUs].")
    ] = None,
    worker_timeout: Annotated[
        float | None, typer.Option(help="Seconds of silence until a worker is replaced [30].")
    ] = None,
    recovery_timeout: Annotated[
        float | None, typer.Option(help="Seconds that streams wait for new workers [60].")
    ] = None,
    journal: Annotated[
        str | None, typer.Option(help="Folder in which requests outlive the server.")
    ] = None,
    journal_max_mb: Annotated[int | None, typer.Option(help="Its size in MiB [1024].")] = None,
    retention: Annotated[
        float | None, typer.Option(help="Seconds that ended requests are kept [300].")
    ] = None,
    max_attach_window: Annotated[
        float | None, typer.Option(help="Most seconds that requests go on without a reader [300].")
    ] = None,
    slow_reader_timeout: Annotated[
        float | None, typer.Option(help="Seconds until a reader that stands still is cut [60].")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="Certificate chain of the port, in PEM.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its key, in PEM.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(help="Clients must bring a certificate that this CA signed.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="JSON or TOML file of bearer tokens; calls need one.")
    ] = None,
    insecure_tokens: Annotated[
        bool, typer.Option("--insecure-tokens", help="Tokens may cross networks without TLS.")
    ] = False,
    no_reflection: Annotated[
        bool, typer.Option("--no-reflection", help="Do not describe the services to callers.")
    ] = False,
    no_operator_calls: Annotated[
        bool, typer.Option("--no-operator-calls", help="Do not serve ListSlots and FlushCache.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Port of /metrics for Prometheus, 0: a free one \\[off]."),
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address of --metrics-port [127.0.0.1].")
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector of traces: http://host:port \\[off]."),
    ] = None,
    trace_sample_ratio: Annotated[
        float | None,
        typer.Option(help="Share of requests to trace, where callers do not say \\[1.0]."),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(help="Serve the OpenAI API too, on this port; 0 takes a free one \\[off]."),
    ] = None,
    http_host: Annotated[
        str | None, typer.Option(help="Address of --http-port [127.0.0.1].")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="Who starts the workers: local, or ray, on the nodes of a cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="auto, local (starts one) or HOST:PORT \\[auto].")
    ] = None,
    ray_strategy: Annotated[
        str | None, typer.Option(help="pack, spread, strict_pack or strict_spread \\[pack].")
    ] = None,
    ray_resources: Annotated[
        str | None, typer.Option(help="Of each rank, besides its GPU or CPUs: NAME=AMOUNT,...")
    ] = None,
    ray_timeout: Annotated[
        float | None, typer.Option(help="Seconds that the cluster has to make room [60].")
    ] = None,
    ray_worker_flags: Annotated[
        str | None, typer.Option(help="Flags of each worker, such as '--tls-cert F --tls-key F'.")
    ] = None,
    workers_tls_ca: Annotated[
        str | None, typer.Option(help="CA of the certificates of workers that Ray starts, in PEM.")
    ] = None,
    workers_tls_cert: Annotated[
        str | None, typer.Option(help="Certificate that they are shown, in PEM.")
    ] = None,
    workers_tls_key: Annotated[str | None, typer.Option(help="Its key, in PEM.")] = None,
    no_status_page: Annotated[
        bool, typer.Option("--no-status-page", help="--http-port serves no page /status.")
    ] = False,
    no_restart: Annotated[
        bool, typer.Option("--no-restart", help="End when the server is killed.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    log_format: Annotated[str | None, typer.Option(help="text or json \\[text].")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve a model over gRPC until SIGTERM or Ctrl-C.

    A server that is killed is started anew; with --journal its requests go on.
    """
    output = Output(as_json)
    flags = server_flags(
        host=host,
        port=port,
        tp=tp,
        num_slots=num_slots,
        max_running=max_running,
        max_seq_len=max_seq_len,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_queue_len=max_queue_len,
        max_waiting_per_client=max_waiting_per_client,
        fair_share=fair_share,
        served_name=served_name,
        grace=grace,
        worker_timeout=worker_timeout,
        recovery_timeout=recovery_timeout,
        journal=journal,
        journal_max_mb=journal_max_mb,
        retention=retention,
        max_attach_window=max_attach_window,
        slow_reader_timeout=slow_reader_timeout,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        tokens=tokens,
        insecure_tokens=insecure_tokens,
        no_reflection=no_reflection,
        no_operator_calls=no_operator_calls,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        otlp_endpoint=otlp_endpoint,
        trace_sample_ratio=trace_sample_ratio,
        log_level=log_level,
        log_format=log_format,
    )
    devices = server_flags(device=device, threads=threads)
    standby = server_flags(standby_workers=standby_workers)
    ray = server_flags(
        ray_address=ray_address,
        ray_strategy=ray_strategy,
        ray_resources=ray_resources,
        ray_timeout=ray_timeout,
        ray_worker_flags=ray_worker_flags,
    )
    workers_tls = server_flags(
        workers_tls_ca=workers_tls_ca,
        workers_tls_cert=workers_tls_cert,
        workers_tls_key=workers_tls_key,
    )
    check_launcher(launcher, only_local=standby, only_ray=ray + workers_tls)
    http = server_flags(
        host=http_host,
        port=http_port,
        no_status_page=no_status_page,
        grace=grace,
        otlp_endpoint=otlp_endpoint,
        trace_sample_ratio=trace_sample_ratio,
        log_level=log_level,
        log_format=log_format,
    )
    gateway = _gateway(http_host, http_port, http, output, restarts=not no_restart)
    if gateway is not None and tls_cert is not None:
        raise CliError(
            "--http-port does not go with --tls-cert: the gateway cannot know who signed the "
            "certificate; start it by itself, with slotwise gateway --tls-ca",
            exit_code=2,
        )
    with output.progress() as report:
        folder = model_folder(model, report)
    restarts = not no_restart
    if launcher == "local":
        _keep(Keeper(folder, flags + devices + standby, output, restarts=restarts, gateway=gateway))
        return
    logs = server_flags(log_level=log_level, log_format=log_format)
    with running_ray_workers(folder, devices + ray + logs, tp or 1, output) as workers:
        flags += ["--workers", "-", *workers_tls]
        _keep(Keeper(folder, flags, output, restarts=restarts, gateway=gateway, workers=workers))


def _keep(keeper: Keeper) -> None:
    with forwarding_signals(keeper):
        keeper.run()


def check_launcher(launcher: str, *, only_local: list[str], only_ray: list[str]) -> None:
    """CliError when there is none of this name, or when flags are another's."""
    if launcher not in ("local", "ray"):
        raise CliError(f"--launcher is {launcher!r}; local or ray is accepted", exit_code=2)
    if others := only_local if launcher == "ray" else only_ray:
        raise CliError(f"{others[0]} does not go with --launcher {launcher}", exit_code=2)


def _gateway(
    host: str | None, port: int | None, flags: list[str], output: Output, *, restarts: bool
) -> GatewayKeeper | None:
    if port is None:
        if host is not None:
            raise CliError("--http-host is given and --http-port is not", exit_code=2)
        return None
    check_port(host or "127.0.0.1", port)
    return GatewayKeeper(flags, output, restarts=restarts)


def server_flags(**settings: str | float | None) -> list[str]:
    """Flags for the scheduler from what was set; the rest keeps the defaults it has there."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags
