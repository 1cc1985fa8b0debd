"""The worker process: `python -m worker --listen ... --model DIR`; also `bench`, `plan`, ..."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

# Read when gRPC and torch are imported: their own logs tell of every stream and wait that ends.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Its event engines hand each message through two more threads: a third of a round trip.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

if __name__ == "__main__" and "--exit-with-parent" in sys.argv:
    # From now on, for the imports take seconds: who ends all processes of a service at once means
    # the parent, which drains first, and then ends this one.
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, signal.SIG_IGN)

import torch
import uvloop

from worker import bench, bench_kernels, device
from worker.config import GRACE_S, TlsFiles, WorkerConfig
from worker.errors import WorkerError
from worker.logs import FORMS, configure_logging
from worker.rank import Rank
from worker.server import start_server

_LOG = logging.getLogger("worker")
_EXIT_STUCK = 75
_STANDBY = "--standby"
_COMMANDS = {
    "bench": bench.main_bench,
    "bench-kernels": bench_kernels.main_bench_kernels,
    "plan": bench.main_plan,
}


def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code."""
    try:
        if arguments and arguments[0] == _STANDBY:
            arguments = _told(arguments[1:])
            if not arguments:
                return 0
        if arguments and arguments[0] in _COMMANDS:
            return _COMMANDS[arguments[0]](arguments[1:])
        config = _parse(arguments)
        if config.parent_pid is not None:
            device.exit_with_parent(config.parent_pid or os.getppid())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config))
    except (WorkerError, ValueError, OSError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1
    return 0


def _told(arguments: list[str]) -> list[str]:
    """Waits, with all libraries loaded, for the command line of a rank, as JSON on standard input;
    none when whoever would send it has ended."""
    parser = argparse.ArgumentParser(prog=f"python -m worker {_STANDBY}")
    parser.add_argument("--exit-with-parent", type=int, required=True, metavar="PID")
    device.exit_with_parent(parser.parse_args(arguments).exit_with_parent)
    device.preload()
    line = sys.stdin.readline()
    told = json.loads(line) if line else []
    if not isinstance(told, list) or not all(isinstance(word, str) for word in told):
        raise ValueError(f"{_STANDBY} was sent {line!r}, which is no list of words")
    return told


def _parse(arguments: list[str]) -> WorkerConfig:
    parser = argparse.ArgumentParser(
        prog="python -m worker",
        description="One tensor-parallel rank. Other commands, with a --help of their own: "
        + ", ".join(_COMMANDS),
    )
    parser.add_argument("--listen", required=True, help="unix:/path.sock or host:port")
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face model folder")
    parser.add_argument(
        "--threads", type=int, default=device.default_threads(), help="on the CPU; a GPU uses none"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (by rank) or cuda:N")
    parser.add_argument(
        "--exit-with-parent",
        nargs="?",
        type=int,
        const=0,
        metavar="PID",
        help="end when the parent process ends, or by SIGUSR1; SIGTERM and SIGINT do nothing. PID: "
        "the parent's, so that one that has ended before is noticed too",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        help="seconds that the scheduler gets after SIGTERM to end its stream",
    )
    parser.add_argument("--log-format", choices=FORMS, default="text", help="form of log lines")
    parser.add_argument("--tls-cert", type=Path, help="certificate chain of a TCP port, in PEM")
    parser.add_argument("--tls-key", type=Path, help="its key, in PEM")
    parser.add_argument(
        "--tls-client-ca", type=Path, help="schedulers must bring a certificate that it signed"
    )
    parsed = parser.parse_args(arguments)
    return WorkerConfig(
        listen=parsed.listen,
        model_dir=parsed.model,
        num_threads=parsed.threads,
        device=parsed.device,
        parent_pid=parsed.exit_with_parent,
        grace_s=parsed.grace,
        tls=_tls_files(parsed),
        log_format=parsed.log_format,
    )


def _tls_files(parsed: argparse.Namespace) -> TlsFiles | None:
    if parsed.tls_cert and parsed.tls_key:
        return TlsFiles(parsed.tls_cert, parsed.tls_key, parsed.tls_client_ca)
    if parsed.tls_cert or parsed.tls_key or parsed.tls_client_ca:
        raise ValueError("TLS needs both --tls-cert and --tls-key")
    return None


async def _serve(config: WorkerConfig) -> None:
    """Serves until a signal, and then for the grace while a stream is open."""
    stop = _stop_signal(config.parent_pid is not None)
    rank = Rank(config.model_dir, config.num_threads, config.device)
    configure_logging(config.log_format, lambda: rank.place)
    server, servicer, address = await start_server(config.listen, rank, _exit_stuck, tls=config.tls)
    _LOG.info("listening on %s", address)
    if config.is_exposed:
        _LOG.warning(
            "whoever reaches %s may use this worker: give --tls-cert, --tls-key and "
            "--tls-client-ca, or keep the network to yourself",
            address,
        )
    await stop.wait()
    if config.parent_pid is None:
        try:
            async with asyncio.timeout(config.grace_s):
                await servicer.drain()
        except TimeoutError:
            _LOG.warning("the stream has outlived the grace of %g s", config.grace_s)
    await server.stop(grace=0)
    await servicer.close()


def _stop_signal(exit_with_parent: bool) -> asyncio.Event:
    """Set by the first signal to end; the second one ends the process at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            _LOG.warning("told to end twice: exiting at once")
            logging.shutdown()
            os._exit(0)
        stop.set()

    numbers = (signal.SIGUSR1,) if exit_with_parent else (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


def _exit_stuck(message: str) -> None:
    """A thread inside a collective cannot be ended; whoever started this process starts it anew."""
    _LOG.critical("%s: exiting", message)
    logging.shutdown()
    os._exit(_EXIT_STUCK)


if __name__ == "__main__":
    configure_logging("text")
    # Torch only adds and copies here; the native library has its own threads.
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
