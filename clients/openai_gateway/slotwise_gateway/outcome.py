"""What became of a request: for the log's line at its end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from slotwise_client import Delta, Event, Finished

# Lines of refused requests in a second; a flood of them must not fill a disk.
MAX_REFUSALS: Final = 20
# Their words may quote what was sent, which is in no log; the client has them.
QUOTING: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
MAX_PARAM: Final = 100

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """Of one request, as far as it came."""

    request_id: str
    began_at: float = field(default_factory=time.monotonic)
    user: str | None = None
    num_prompts: int = 0
    is_streamed: bool = False
    # The server has taken it.
    first_token_s: float | None = None
    finishes: list[Finished] = field(default_factory=list)
    # The client left before the end.
    is_client_gone: bool = False
    # Why it was refused, or has failed; may quote the body.
    error: str = ""
    # The field that is at fault.
    param: str | None = None

    def note(self, event: Event) -> None:
        """Told of each event of the answer."""
        if type(event) is Delta:
            if self.first_token_s is None:
                self.first_token_s = time.monotonic() - self.began_at
        elif isinstance(event, Finished):
            self.finishes.append(event)

    def fields(self, method: str, route: str, status: int) -> dict[str, object]:
        """For the log. Nothing of the prompt or of the answer."""
        told: dict[str, object] = {
            "request_id": self.request_id,
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": _ms(time.monotonic() - self.began_at),
        }
        if self.num_prompts:
            told["prompts"], told["streamed"] = self.num_prompts, self.is_streamed
        if self.user:
            told["user"] = self.user
        if self.first_token_s is not None:
            told["ttft_ms"] = _ms(self.first_token_s)
        if self.finishes:
            told |= _usage(self.finishes)
        if self.is_client_gone:
            told["client_gone"] = True
        if self.param is not None:
            told["param"] = self.param[:MAX_PARAM]
        if self.error and status not in QUOTING:
            told["error"] = self.error
        return told


class EndLog:
    """A line at the end of each request."""

    def __init__(self) -> None:
        self._second = 0
        self._num_refusals = 0

    def tell(self, fields: dict[str, object], trace_ids: dict[str, str], level: int) -> None:
        """`fields`: of an Outcome."""
        status = fields["status"]
        assert isinstance(status, int)
        if status >= HTTPStatus.BAD_REQUEST and "ttft_ms" not in fields and self._is_flood():
            return
        words = (f"{name}={_word(value)}" for name, value in fields.items())
        log.log(level, "ended: %s", " ".join(words), extra={"fields": {**fields, **trace_ids}})

    def _is_flood(self) -> bool:
        """Counts a refusal; True when too many came in this second."""
        second = int(time.monotonic())
        if second != self._second:
            left_out = self._num_refusals - MAX_REFUSALS
            if left_out > 0:
                log.info("%d more requests were refused or left in a second", left_out)
            self._second, self._num_refusals = second, 0
        self._num_refusals += 1
        return self._num_refusals > MAX_REFUSALS


def _usage(finishes: list[Finished]) -> dict[str, object]:
    """Of several answers, all tokens. A prompt is counted once, whatever number of answers."""
    prompts = {one.request_id: one.usage for one in finishes}
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in prompts.values()),
        "completion_tokens": sum(one.usage.completion_tokens for one in finishes),
        "cached_tokens": sum(usage.cached_tokens for usage in prompts.values()),
        "finish_reason": ",".join(sorted({one.finish_reason.value for one in finishes})),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def _word(value: object) -> str:
    text = str(value)
    return repr(text) if not text or set(text) & set(" ='\"") else text
