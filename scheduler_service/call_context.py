"""What we use of grpc.aio's context of a call (the package has no types)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import grpc


class CallContext(Protocol):
    """One RPC, as the server sees it. The handler is cancelled when the client goes away."""

    async def write(self, message: Any) -> None:
        """Sends one message of a stream; waits while the client is slow."""

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, bytes]] = (),
    ) -> NoReturn:
        """Ends the call with a status."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it set none."""
