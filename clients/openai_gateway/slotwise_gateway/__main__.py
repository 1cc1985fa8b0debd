"""`python -m slotwise_gateway --server HOST:PORT`: exit 0 after a drain, 1 when it cannot start, 2
for settings that cannot be."""

from __future__ import annotations

import asyncio
import os
import sys

# gRPC reads these when it is imported. Its own log tells of every stream that ends; its event
# engine hands each message through two more threads.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")

import uvloop

from .config import Config, ConfigError, parse_arguments
from .logs import configure_logging
from .process import Process


def main() -> int:
    """Errors of the set-up go to standard error as one `error:` paragraph."""
    try:
        config = parse_arguments()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    configure_logging(config.log_level, config.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(config: Config) -> None:
    await Process(config).run()


if __name__ == "__main__":
    sys.exit(main())
