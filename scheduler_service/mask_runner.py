"""Runs constraints beside the event loop: which tokens may follow takes a while to find out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .errors import UnavailableError
from .request import Mask, Request

# Libraries let others run meanwhile, and a constrained request has one call at a time.
_NUM_THREADS = 2


class MaskRunner:
    """Calls on_mask(request, number of its tokens, its mask or what `advance` raised)."""

    def __init__(self, on_mask: Callable[[Request, int, Mask | BaseException], None]) -> None:
        self._on_mask = on_mask
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mask")
        self._is_closed = False

    def advance(self, request: Request, token_ids: tuple[int, ...]) -> None:
        """These are the request's last tokens. There is no other call for it under way, since it
        gets no tokens without a mask."""
        assert request.constraint is not None
        num_generated = len(request.generated_token_ids)
        loop = asyncio.get_running_loop()
        try:
            found = loop.run_in_executor(self._threads, request.constraint.advance, token_ids)
        except RuntimeError as error:
            # This request's misfortune alone: no thread can be started.
            failed = loop.create_future()
            failed.set_exception(
                UnavailableError(f"the output's constraint cannot be followed now: {error}")
            )
            found = failed
        found.add_done_callback(lambda done: self._tell(request, num_generated, done))

    def close(self) -> None:
        """on_mask is called no more. A call under way ends by itself."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _tell(self, request: Request, num_generated: int, done: asyncio.Future[Mask]) -> None:
        if self._is_closed or done.cancelled():
            return
        self._on_mask(request, num_generated, done.exception() or done.result())
