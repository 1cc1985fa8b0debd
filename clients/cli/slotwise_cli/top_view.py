"""How `slotwise top` looks: figures become lines that fit a terminal of any size. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from slotwise_client import RankLoad, ServerState, SlotState

from .top_state import Figures, Percentiles, Seat


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What bars and lines are made of. `steps`: rising heights; `parts`: of a cell of a bar."""

    full: str
    parts: str
    empty: str
    steps: str
    dot: str
    rule: str
    more: str


UNICODE: Final = Glyphs("█", "▏▎▍▌▋▊▉", "·", "▁▂▃▄▅▆▇█", "●", "─", "…")
ASCII: Final = Glyphs("#", "", ".", "_.:-=+*#", "*", "-", ".")


@dataclass(frozen=True, slots=True)
class Head:
    """Who is shown. Empty and 0 where it is not known yet; `up_since`: a wall clock's words."""

    address: str
    model: str = ""
    version: str = ""
    max_queue_len: int = 0
    up_since: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """All that one picture shows.

    figures None: the server was never reached. `lost`: why it does not answer now; the figures are
    the last ones then. `no_seats`: why it does not tell its seats.
    """

    head: Head
    figures: Figures | None
    lost: str = ""
    no_seats: str = ""
    is_paused: bool = False
    has_keys: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    """`rank`: the higher, the sooner it is left out."""

    rank: int
    text: Text


_STATES: Final = {
    ServerState.READY: "bold green",
    ServerState.DRAINING: "bold yellow",
    ServerState.STARTING: "bold yellow",
    ServerState.RECOVERING: "bold magenta",
    ServerState.DOWN: "bold red",
}
_SEATS: Final = {
    SlotState.DECODE: "green",
    SlotState.PREFILL: "yellow",
    SlotState.FREE: "bright_black",
}
_LETTERS: Final = {SlotState.DECODE: "D", SlotState.PREFILL: "P", SlotState.FREE: "."}
_FAINT: Final = "bright_black"
_LABEL: Final = "cyan"
_DECORATION: Final = 9
# Columns of a seat: in one line of its own, in a cell of a table.
_SEAT_COLUMNS: Final = 60
_CELL_COLUMNS: Final = 30
_LABEL_COLUMNS: Final = 11
_TWO_COLUMNS: Final = 104


def view(scene: Scene, width: int, height: int, glyphs: Glyphs = UNICODE) -> list[Text]:
    """At most `height` lines of at most `width` cells each."""
    painter = _Painter(scene, width, glyphs)
    return [_fitted(line, width, glyphs) for line in painter.lines(height)]


class _Painter:
    def __init__(self, scene: Scene, width: int, glyphs: Glyphs) -> None:
        self._scene = scene
        self._width = width
        self._glyphs = glyphs

    def lines(self, height: int) -> list[Text]:
        figures = self._scene.figures
        above = list(self._top())
        if figures is None:
            return _kept(above, height)
        above += self._numbers(figures)
        below = [*self._ranks(figures.ranks), *self._keys()]
        # Seats in the most telling way that fits, at first with all else that there is to say.
        for max_rank in (_DECORATION, _DECORATION - 1, 5, 3):
            rest = [line for line in (*above, *below) if line.rank <= max_rank]
            title = max_rank == _DECORATION
            seats = self._seats(figures, height - len(rest) - title)
            if seats is not None:
                break
        else:
            rest = [line for line in (*above, *below) if line.rank <= 3]
            seats = self._map(figures.seats or ())[: max(0, height - len(rest))]
        if title and seats:
            seats = [self._rule(_seats_title(figures)), *seats]
        num_above = sum(line.rank <= max_rank for line in above)
        texts = [line.text for line in rest]
        shown = [*texts[:num_above], *seats, *texts[num_above:]]
        if len(shown) > height:
            shown = _kept(rest, height)
        return [_faded(text) for text in shown] if self._scene.lost else shown

    def _top(self) -> Iterator[_Line]:
        scene, figures = self._scene, self._scene.figures
        head = Text()
        word, style = self._state()
        head.append(f"{self._glyphs.dot} {word}", style)
        if scene.is_paused:
            head.append("  ").append("PAUSED", "bold reverse")
        head.append(f"  {scene.head.model or 'slotwise'}", "bold")
        head.append(f"  {scene.head.address}")
        if figures is not None:
            head.append(f"  up {_span(figures.uptime_s)}")
            if scene.head.up_since:
                head.append(f" since {scene.head.up_since}", _FAINT)
            head.append(f"  epoch {figures.epoch}", _FAINT)
        if scene.head.version:
            head.append(f"  slotwise {scene.head.version}", _FAINT)
        yield _Line(0, head)
        if scene.lost:
            words = "the last values are shown" if figures else "waiting for it"
            yield _Line(0, Text(f"{scene.lost}; {words}", "bold red"))
        elif scene.no_seats:
            yield _Line(4, Text(f"seats are not told: {scene.no_seats}", "yellow"))
        yield _Line(_DECORATION, Text())

    def _state(self) -> tuple[str, str]:
        if self._scene.lost or self._scene.figures is None:
            return "UNREACHABLE" if self._scene.lost else "CONNECTING", "bold red"
        state = self._scene.figures.state
        return str(state).upper(), _STATES.get(state, "bold")

    def _numbers(self, figures: Figures) -> Iterator[_Line]:
        left = [*self._queue(figures), *self._speed(figures)]
        right = list(self._times(figures))
        if self._width < _TWO_COLUMNS:
            yield from (*left, *right)
            return
        column = self._width // 2
        for i in range(max(len(left), len(right))):
            line = left[i].text.copy() if i < len(left) else Text()
            line.truncate(column - 2, pad=True)
            if i < len(right):
                line.append("  ").append_text(right[i].text)
            # Half as many lines, so that each is worth the more.
            yield _Line(min(part[i].rank for part in (left, right) if i < len(part)), line)

    def _queue(self, figures: Figures) -> Iterator[_Line]:
        running = self._label("running")
        running.append(f"{figures.num_running}/{figures.max_running}", "bold")
        running.append(" ")
        running.append_text(self._bar(figures.num_running, figures.max_running, 16, "green"))
        yield _Line(1, running)
        queue = self._label("queue")
        limit = self._scene.head.max_queue_len
        queue.append(str(figures.num_waiting), "bold" if figures.num_waiting else "")
        if limit:
            queue.append(f"/{limit} ")
            queue.append_text(self._bar(figures.num_waiting, limit, 8, "yellow"))
        if figures.num_waiting:
            queue.append(f" oldest {_time(figures.oldest_waiting_s)}")
        yield _Line(2, queue)

    def _speed(self, figures: Figures) -> Iterator[_Line]:
        yield self._rate_line(
            1, "generated", figures.generated_per_s, figures.generated_history, "green"
        )
        yield self._rate_line(
            4, "prefill", figures.prefill_per_s, figures.prefill_history, "yellow"
        )
        requests = self._label("requests")
        requests.append(f"{_number(figures.ended_per_s)}/s ended")
        for count, word in ((figures.num_errors, "errors"), (figures.num_refused, "refused")):
            requests.append(f"  {count} {word}", "bold red" if count else "")
        yield _Line(5, requests)
        steps = self._label("steps")
        steps.append(f"{_number(figures.steps_per_s)}/s")
        steps.append(f"  {_percent(figures.prefill_share)} of their time with prefill")
        yield _Line(7, steps)

    def _times(self, figures: Figures) -> Iterator[_Line]:
        window_s = figures.latency_window_s
        since = "since start" if window_s is None else f"last {window_s:.0f} s"
        head = Text(f"{'':{_LABEL_COLUMNS}}{'p50':>8}{'p90':>8}{'p99':>8}  {since}", _FAINT)
        yield _Line(6, head)
        yield _Line(3, self._percentiles("1st token", figures.time_to_first_token))
        yield _Line(5, self._percentiles("per token", figures.inter_token_latency))
        yield _Line(7, self._percentiles("request", figures.e2e_request_latency))
        cache = self._label("cache hits")
        cache.append(f"{_percent(figures.hit_rate)} last minute")
        cache.append(f"  {_percent(figures.hit_rate_since_start)} since start", _FAINT)
        yield _Line(6, cache)

    def _rate_line(
        self,
        rank: int,
        name: str,
        rate: float | None,
        history: Sequence[float | None],
        style: str,
    ) -> _Line:
        line = self._label(name)
        line.append(f"{_number(rate):>6}", "bold").append(" tok/s ")
        column = self._width // 2 - 2 if self._width >= _TWO_COLUMNS else self._width
        room = max(0, column - cell_len(line.plain))
        line.append(self._spark(history[-room:] if room else ()), style)
        return _Line(rank, line)

    def _percentiles(self, name: str, times: Percentiles) -> Text:
        line = self._label(name)
        for value in (times.p50_s, times.p90_s, times.p99_s):
            line.append(f"{_time(value):>8}")
        return line.append(f"  n={times.num}", _FAINT)

    def _seats(self, figures: Figures, room: int) -> list[Text] | None:
        """None: they do not fit."""
        seats = figures.seats
        if seats is None:
            busy = min(figures.num_running, figures.num_slots)
            line = self._label("seats").append(f"{busy} of {figures.num_slots} busy")
            return [line] if room >= 1 else None
        if len(seats) <= room and self._width >= _SEAT_COLUMNS:
            return [self._seat(seat, figures.max_seq_len) for seat in seats]
        for columns in range(1, self._width // _CELL_COLUMNS + 1):
            num_rows = -(-len(seats) // columns)
            if num_rows <= room:
                return list(self._table(seats, columns, num_rows, figures.max_seq_len))
        found = self._map(seats)
        return found if len(found) <= room else None

    def _seat(self, seat: Seat, max_seq_len: int) -> Text:
        style = _SEATS.get(seat.state, "")
        line = Text().append(f"{seat.index:>4} ", _FAINT)
        line.append(f"{seat.state:<8}", style)
        if seat.state is SlotState.FREE:
            line.append(f"{'':9}").append_text(self._bar(0, 1, self._bar_columns(), style))
            told = f"  {seat.cached_tokens} tokens cached" if seat.cached_tokens else ""
            return line.append(told, _FAINT)
        line.append(f"{self._short(seat.request_id, 8):<9}")
        bar = self._bar(seat.num_positions, max_seq_len, self._bar_columns(), style)
        line.append_text(bar)
        if self._width >= 80:
            line.append(f" {seat.num_positions:>6}/{max_seq_len}")
        line.append(f" {seat.generated_tokens:>6} new")
        if seat.tokens_per_s is not None:
            line.append(f" {_number(seat.tokens_per_s):>5} tok/s", "bold")
        return line

    def _bar_columns(self) -> int:
        """Of a seat's line: what its other words leave."""
        return max(8, min(48, self._width - (63 if self._width >= 80 else 47)))

    def _table(
        self, seats: Sequence[Seat], columns: int, num_rows: int, max_seq_len: int
    ) -> Iterator[Text]:
        """Down first."""
        column = self._width // columns
        for row in range(num_rows):
            line = Text()
            for seat in seats[row::num_rows]:
                cell = self._cell(seat, max_seq_len)
                cell.truncate(column - 1, pad=True)
                line.append_text(cell).append(" ")
            yield line

    def _cell(self, seat: Seat, max_seq_len: int) -> Text:
        style = _SEATS.get(seat.state, "")
        line = Text().append(f"{seat.index:>3} ", _FAINT)
        line.append(f"{_LETTERS.get(seat.state, '?')} ", style)
        if seat.state is SlotState.FREE:
            return line.append(f"{seat.cached_tokens} cached" if seat.cached_tokens else "", _FAINT)
        line.append(f"{self._short(seat.request_id, 7):<8}")
        line.append_text(self._bar(seat.num_positions, max_seq_len, 6, style))
        return line.append(f" {_number(seat.tokens_per_s):>5}/s")

    def _map(self, seats: Sequence[Seat]) -> list[Text]:
        """One letter for each, in tens."""
        groups = [seats[i : i + 10] for i in range(0, len(seats), 10)]
        # The number of its first seat, then eleven columns for each group.
        per_line = max(1, (self._width - 5) // 11)
        lines = []
        for i in range(0, len(groups), per_line):
            line = Text().append(f"{groups[i][0].index:>4} ", _FAINT)
            for group in groups[i : i + per_line]:
                for seat in group:
                    line.append(_LETTERS.get(seat.state, "?"), _SEATS.get(seat.state, ""))
                line.append(" ")
            lines.append(line)
        return lines

    def _ranks(self, ranks: Sequence[RankLoad]) -> Iterator[_Line]:
        if ranks:
            yield _Line(
                _DECORATION, self._rule(f"ranks: {sum(r.is_up for r in ranks)} of {len(ranks)} up")
            )
        for rank in ranks:
            line = Text().append(f"{rank.rank:>4} ", _FAINT)
            line.append(
                "up      " if rank.is_up else "DOWN    ", "green" if rank.is_up else "bold red"
            )
            line.append(f"{rank.device:<10}")
            if rank.device_memory_bytes:
                bar = self._bar(rank.memory_bytes, rank.device_memory_bytes, 16, "blue")
                line.append_text(bar)
            line.append(f" {_bytes(rank.memory_bytes)}")
            if rank.device_memory_bytes:
                line.append(f" of {_bytes(rank.device_memory_bytes)}")
            # One that is down is worth a line before what is only good to know.
            yield _Line(8 if rank.is_up else 3, line)

    def _keys(self) -> Iterator[_Line]:
        if self._scene.has_keys:
            yield _Line(_DECORATION, Text("q quit  p pause  r forget the last minute", _FAINT))

    def _label(self, name: str) -> Text:
        return Text().append(f"{name:<{_LABEL_COLUMNS}}", _LABEL)

    def _rule(self, title: str) -> Text:
        rule = self._glyphs.rule
        room = max(0, self._width - len(title) - 4)
        return Text(f"{rule}{rule} {title} {rule * room}", _FAINT)

    def _bar(self, part: float, whole: float, columns: int, style: str) -> Text:
        eighths = round(8 * columns * min(1.0, max(0.0, part / whole if whole else 0.0)))
        # Little is not nothing.
        if part > 0:
            eighths = max(1, eighths)
        full, rest = divmod(eighths, 8)
        bar = self._glyphs.full * full
        if rest:
            bar += self._glyphs.parts[rest - 1] if self._glyphs.parts else self._glyphs.full
        text = Text().append(bar, style)
        return text.append(self._glyphs.empty * (columns - len(bar)), _FAINT)

    def _spark(self, values: Sequence[float | None]) -> str:
        steps = self._glyphs.steps
        highest = max((value for value in values if value is not None), default=0.0)
        top = len(steps) - 1
        return "".join(
            " " if value is None else steps[round(top * value / highest) if highest else 0]
            for value in values
        )

    def _short(self, request_id: str, columns: int) -> str:
        clean = "".join(char if char.isprintable() else "?" for char in request_id)
        if self._glyphs is ASCII:
            clean = clean.encode("ascii", "replace").decode()
        text = Text(clean)
        text.truncate(columns, overflow="crop")
        return text.plain


def _seats_title(figures: Figures) -> str:
    if figures.seats is None:
        return "seats"
    busy = sum(seat.state is not SlotState.FREE for seat in figures.seats)
    return f"seats: {busy} of {len(figures.seats)} busy, {figures.max_seq_len} positions each"


def _kept(lines: Iterable[_Line], height: int) -> list[Text]:
    """The most important ones, in their order."""
    numbered = list(enumerate(lines))
    best = sorted(numbered, key=lambda one: (one[1].rank, one[0]))[:height]
    return [line.text for _, line in sorted(best, key=lambda one: one[0])]


def _fitted(line: Text, width: int, glyphs: Glyphs) -> Text:
    text = line.copy()
    text.no_wrap = True
    text.rstrip()
    if glyphs is ASCII:
        # Names of models and devices are anybody's.
        plain = text.plain.encode("ascii", "replace").decode()
        if len(plain) == len(text.plain):
            text.plain = plain
    text.truncate(width, overflow="crop" if glyphs is ASCII else "ellipsis")
    return text


def _faded(text: Text) -> Text:
    """What was true, in grey. What is red says what is wrong, and stays."""
    faded = Text(text.plain, text.style if "red" in str(text.style) else _FAINT)
    faded.spans = [span for span in text.spans if "red" in str(span.style)]
    return faded


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 9999.5:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"


def _bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"
