"""The status page: what is served, and the same facts as plain tables for browsers without
JavaScript."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from .caller import caller_token
from .errors import ApiError
from .gateway import Gateway
from .status_watch import Board

# Nothing is loaded from anywhere, nothing but the page's own script runs, nobody frames it.
_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'"
)
_SEAT_HEADS: Final = ("seat", "state", "request", "prompt", "generated", "progress", "tok/s")
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class StatusPages:
    """`/status` and its data."""

    def __init__(self, gateway: Gateway) -> None:
        self._board = Board(gateway)

    def routes(self) -> list[Route]:
        """`/` leads to the page, by a path that holds behind a proxy's prefix too."""
        return [
            Route("/", lambda request: RedirectResponse("status", headers=_HEADERS)),
            Route("/status", self.page),
            Route("/status.json", self.data),
        ]

    async def data(self, request: Request) -> Response:
        """What the page asks for each second."""
        report = await self._board.report(caller_token(request.scope))
        return Response(report.body, headers=_HEADERS, media_type="application/json")

    async def page(self, request: Request) -> Response:
        """The page is for everybody; the facts in it are for those whom the server tells them."""
        try:
            report = await self._board.report(caller_token(request.scope))
            tables = "".join(_tables(report.fields))
        except ApiError as error:
            tables = _paragraph(error.message)
        shell, policy = _shell()
        headers = {**_HEADERS, "Content-Security-Policy": policy}
        return Response(
            shell.replace("<!-- facts -->", tables), headers=headers, media_type="text/html"
        )


@cache
def _shell() -> tuple[str, str]:
    """The page but for its facts, and the policy that lets its style and script in."""
    folder = resources.files(__package__)
    page, style, script = (
        (folder / name).read_text("utf-8") for name in ("status.html", "status.css", "status.js")
    )
    page = page.replace("/* style */", style).replace("/* script */", script)
    return page, _POLICY.format(style=_sha256(style), script=_sha256(script))


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _tables(report: dict[str, Any]) -> Iterator[str]:
    """All facts of a report, as HTML. Texts of others are in it, escaped."""
    facts = report["facts"]
    yield _table("Server", (), _server(report))
    if report["note"]:
        yield _paragraph(report["note"])
    if report["is_old"]:
        yield _paragraph(f"What follows is {_seconds(report['age_s'])} old.")
    if facts is None:
        return
    yield _table("Load", (), _load(facts))
    if facts["slots"] is None:
        yield _paragraph(report["slots_note"])
    else:
        yield _table("Seats", _SEAT_HEADS, map(_seat, facts["slots"]))
    yield _table("Ranks", ("rank", "state", "device", "memory"), map(_rank, facts["ranks"]))
    ends = ((end["words"], end["num"], end["num_lately"]) for end in facts["requests"])
    yield _table("How requests ended", ("requests", "since start", "last minute"), ends)


def _server(report: dict[str, Any]) -> Iterator[Sequence[object]]:
    yield "state", f"{report['state']}: {report['words']}"
    if report["is_gateway_draining"]:
        yield "gateway", "shuts down"
    yield "model", report["model"]
    if facts := report["facts"]:
        yield "up for", _seconds(facts["uptime_s"])
        yield "epoch of the workers", facts["epoch"]
        yield "times that workers came back", facts["num_recoveries"]


def _load(facts: dict[str, Any]) -> Iterator[Sequence[object]]:
    yield "running", f"{facts['num_running']} of {facts['max_running']}"
    yield "waiting", facts["num_waiting"]
    yield "oldest wait", _seconds(facts["oldest_waiting_s"])
    yield "generated tokens per second", facts["generated_per_s"]
    yield "prompt tokens per second", facts["prompt_per_s"]
    latencies = facts["latencies"]
    window_s = latencies["window_s"]
    span = "since start" if window_s is None else f"last {_seconds(window_s)}"
    for name, words in (
        ("time_to_first_token", "time to the first token"),
        ("inter_token", "time between tokens"),
    ):
        found = latencies[name]
        yield (
            f"{words}, half / 99 % within, {span}",
            f"{_seconds(found['p50_s'])} / {_seconds(found['p99_s'])}",
        )
    cache_hits = facts["prefix_cache"]
    yield "prompt tokens found in the cache, last minute", _percent(cache_hits["hit_rate"])
    yield "the same since start", _percent(cache_hits["hit_rate_since_start"])


def _seat(seat: dict[str, Any]) -> Sequence[object]:
    request = seat["request"]
    if request is not None and seat["choice"]:
        request = f"{request} #{seat['choice']}"
    return (
        seat["index"],
        seat["state"],
        request,
        seat["prompt_tokens"],
        seat["generated_tokens"],
        _percent(seat["progress"]),
        seat["tokens_per_s"],
    )


def _rank(rank: dict[str, Any]) -> Sequence[object]:
    memory = _gib(rank["memory_bytes"])
    if rank["device_memory_bytes"]:
        memory += f" of {_gib(rank['device_memory_bytes'])}"
    return rank["rank"], "up" if rank["is_up"] else "down", rank["device"], memory


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The first cell of a row names it."""
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    body = "".join(map(_row, rows))
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _row(cells: Sequence[object]) -> str:
    first, *others = ("-" if cell is None else html.escape(str(cell)) for cell in cells)
    return f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{one}</td>" for one in others)


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _gib(value: int) -> str:
    return f"{value / 2**30:.2f} GiB"
