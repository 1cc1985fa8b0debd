"""`python -m scheduler_service --model DIR`: exit 0 after a drain, 1 when it cannot start, 2 for
settings that cannot be."""

from __future__ import annotations

import asyncio
import os
import sys

# gRPC reads these when it is imported, also in the workers that are spawned. Its fork handlers may
# crash a worker between fork and exec, and its own log tells of every stream that ends. Its event
# engines hand each message through two more threads: a third of a round trip.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import uvloop

from .config import Config, ConfigError, parse_arguments
from .engine_types import EngineFailedError
from .json_file import ModelFilesError
from .logs import configure_logging
from .process import Process


def main() -> int:
    """Errors of the set-up go to standard error as one `error:` paragraph."""
    try:
        config = parse_arguments()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        configure_logging(config.log_level, config.log_format)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config))
    except (ConfigError, ModelFilesError, EngineFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(config: Config) -> None:
    await Process(config).run()


if __name__ == "__main__":
    sys.exit(main())
