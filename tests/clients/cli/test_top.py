"""`slotwise top`: its figures, its lines at every size, and the program in a real terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from clients.cli.tmux import terminal
from free_ports import fixed_port
from rich.console import Console
from rich.text import Text

from integration.servers import Server, running_server
from slotwise_cli.top_state import Sample, Window
from slotwise_cli.top_view import ASCII, UNICODE, Head, Scene, view
from slotwise_client import (
    Client,
    Counters,
    Histogram,
    Latencies,
    Load,
    PermissionDeniedError,
    PrefixCache,
    RankLoad,
    ServerState,
    Slot,
    SlotState,
    SlotwiseError,
    UnauthenticatedError,
)

FIGURES = Path(__file__).parents[3] / "docs" / "figures"
WRITE_FIGURES = os.environ.get("SLOTWISE_WRITE_FIGURES") == "1"
BOUNDS = (0.1, 1.0, 10.0)
NONE = Histogram(BOUNDS, (0, 0, 0, 0), 0.0)
NUM_SLOTS = 8
# The small model is fast: its answers go on for as long as the demo model's, that each has a rate.
MAX_SEQ_LEN, ANSWER_LEN = (1024, 300) if WRITE_FIGURES else (4096, 3000)


def counters(**given: int) -> Counters:
    return Counters(**{field.name: 0 for field in dataclasses.fields(Counters)} | given)


def load(uptime_s: float, **given) -> Load:
    cache = given.pop("prefix_cache", PrefixCache(0, 0, 0, 0, 0, 0, 0, 0))
    requests = given.pop("requests", counters())
    ttft = given.pop("ttft", NONE)
    defaults = {field.name: 0 for field in dataclasses.fields(Load)} | {
        "num_slots": NUM_SLOTS,
        "max_running": NUM_SLOTS,
        "max_total_tokens": NUM_SLOTS * 1000,
        "state": ServerState.READY,
        "epoch": 1,
        "ranks": (RankLoad(0, "cuda:0", True, 40 * 10**9, 80 * 10**9),),
        "uptime_ns": round(uptime_s * 1e9),
        "latencies": Latencies(ttft, *([NONE] * (len(dataclasses.fields(Latencies)) - 1))),
        "prefix_cache": cache,
        "requests": requests,
    }
    return Load(**defaults | given)


def slot(index: int, generated: int, state=SlotState.DECODE, generation: int = 1) -> Slot:
    name = None if state is SlotState.FREE else f"request-{index:04}"
    return Slot(index, generation, state, name, 100 + generated, 100, generated, 0, 0)


def figures_of(*samples: Sample):
    window = Window()
    for sample in samples:
        window.add(sample)
    return window.figures()


def sample(at_s: float, slots=(), **given) -> Sample:
    return Sample(at_s, load(at_s, **given), slots)


# Figures.


def test_one_sample_knows_no_rate():
    figures = figures_of(sample(5, (slot(0, 7),), num_generated_tokens=7))
    assert figures.generated_per_s is None
    assert figures.seats[0].tokens_per_s is None
    assert set(figures.generated_history) == {None}


def test_rates_are_of_the_last_two_seconds():
    """Not of the minute, in which it was slower."""
    before = [sample(at_s, num_generated_tokens=at_s) for at_s in range(1, 21)]
    after = [sample(20 + i, num_generated_tokens=20 + 50 * i, num_steps=10 * i) for i in (1, 2, 3)]
    figures = figures_of(*before, *after)
    assert figures.generated_per_s == 50
    assert figures.steps_per_s == 10
    assert figures.generated_history[-4:] == pytest.approx((1, 50, 50, 50))
    assert figures.generated_history[:38] == (None,) * 38


def test_prefill_is_what_was_computed():
    """Neither what waits for it nor what the prefix cache had."""
    cache = PrefixCache(1000, 300, 1, 0, 0, 0, 0, 0)
    given = {"num_prompt_tokens": 1000, "num_pending_prefill_tokens": 500}
    figures = figures_of(sample(1), sample(3, prefix_cache=cache, **given))
    assert figures.prefill_per_s == 100
    assert figures.hit_rate == figures.hit_rate_since_start == 0.3


def test_the_rate_of_a_seat_is_of_its_tenant():
    first = (slot(0, 10), slot(1, 90, generation=1), slot(2, 0, SlotState.PREFILL))
    then = (slot(0, 30), slot(1, 4, generation=2), slot(2, 5))
    seats = figures_of(sample(1, first), sample(2, then)).seats
    assert [seat.tokens_per_s for seat in seats] == [20, None, 5]


@pytest.mark.parametrize("uptime_s", [0.5, 30.0])
def test_a_server_that_was_restarted_begins_anew(uptime_s):
    """By its uptime, or by counters: it may have been away for longer than the old one ran."""
    old = sample(10, (slot(0, 500),), num_generated_tokens=5000, num_steps=900)
    new = Sample(50, load(uptime_s, num_generated_tokens=40), (slot(0, 20),))
    figures = figures_of(old, new)
    assert figures.generated_per_s is None
    assert figures.seats[0].tokens_per_s is None
    assert figures.num_errors == 0
    later = Sample(52, load(uptime_s + 2, num_generated_tokens=60), (slot(0, 40),))
    assert figures_of(old, new, later).generated_per_s == 10


def test_latencies_are_of_the_last_minute():
    slow = Histogram(BOUNDS, (0, 0, 100, 0), 500.0)
    fast = Histogram(BOUNDS, (100, 0, 100, 0), 505.0)
    young = figures_of(sample(100, ttft=slow))
    assert young.latency_window_s is None
    assert young.time_to_first_token.p50_s == pytest.approx(5.5)
    samples = [sample(at_s, ttft=slow if at_s < 130 else fast) for at_s in range(100, 161)]
    figures = figures_of(*samples)
    assert figures.latency_window_s == 60
    assert figures.time_to_first_token.num == 100
    assert figures.time_to_first_token.p50_s == pytest.approx(0.05)
    assert figures.time_to_first_token.p90_s == pytest.approx(0.09)
    # And forgotten when the minute has passed.
    rest = [sample(at_s, ttft=fast) for at_s in range(161, 200)]
    assert figures_of(*samples, *rest).time_to_first_token.num == 0


def test_reset_forgets_the_minute():
    window = Window()
    for at_s, errors in ((1, 0), (20, 3)):
        window.add(sample(at_s, requests=counters(accepted=9, error=errors, rejected_full=errors)))
    assert (window.figures().num_errors, window.figures().num_refused) == (3, 3)
    window.reset()
    assert (window.figures().num_errors, window.figures().num_refused) == (0, 0)


# Lines.


def scenes(num_slots: int) -> Iterator[Scene]:
    states = (SlotState.DECODE, SlotState.PREFILL, SlotState.FREE)
    slots = tuple(slot(i, 10 * i, states[i % 3]) for i in range(num_slots))
    given = {
        "num_slots": num_slots,
        "max_total_tokens": 131072 * num_slots,
        "num_running": num_slots,
        "max_running": num_slots,
        "num_waiting": 12345,
        "oldest_waiting_ns": 10**12,
        "ranks": tuple(
            RankLoad(rank, f"cuda:{rank}", rank != 5, 70 * 10**9, 80 * 10**9) for rank in range(8)
        ),
    }
    figures = figures_of(
        sample(1, slots, **given), sample(3, slots, num_generated_tokens=10**6, **given)
    )
    head = Head("a-rather-long-host-name.example.org:50051", "qwen3-模型-8b", "0.1.0", 256, "today")
    yield Scene(head, figures, has_keys=True)
    yield Scene(head, figures, lost="no answer from there: " + "x" * 300, is_paused=True)
    yield Scene(head, dataclasses.replace(figures, seats=None), no_seats="not for you " * 20)
    yield Scene(head, None, lost="no answer from 127.0.0.1:1")
    yield Scene(head, None)


@pytest.mark.parametrize("num_slots", [1, 8, 64, 1024])
def test_no_line_overflows(num_slots):
    for scene in scenes(num_slots):
        for width in (40, 41, 59, 60, 79, 80, 103, 104, 120, 200):
            for height in (1, 2, 8, 10, 24, 40, 60):
                for glyphs in (UNICODE, ASCII):
                    lines = view(scene, width, height, glyphs)
                    assert 0 < len(lines) <= height
                    assert max(line.cell_len for line in lines) <= width
                    assert glyphs is UNICODE or "".join(map(str, lines)).isascii()


def shown(scene: Scene, width: int, height: int, glyphs=UNICODE) -> str:
    return "\n".join(line.plain for line in view(scene, width, height, glyphs))


def test_the_smallest_terminal_has_what_matters_most():
    text = shown(next(scenes(8)), 40, 10)
    for words in ("READY", "running", "queue", "generated", "1st token", "DP.DP.DP"):
        assert words in text
    assert "DOWN" in text  # the rank that is


@pytest.mark.parametrize(
    ("num_slots", "width", "height", "seat"),
    [
        (8, 100, 40, "decode  request-"),
        (8, 40, 40, "0 D request"),
        (64, 200, 60, "0 D request"),
        (64, 80, 24, "DP.DP.DP.D P.DP.DP.DP"),
        (1024, 80, 60, "DP.DP.DP.D P.DP.DP.DP"),
    ],
)
def test_seats_are_told_as_fully_as_they_fit(num_slots, width, height, seat):
    assert seat in shown(next(scenes(num_slots)), width, height)


def test_no_number_of_seats_is_hidden_where_letters_fit():
    for num_slots, width, height in ((64, 80, 24), (1024, 200, 40), (64, 40, 24)):
        rows = re.findall(r"(?m)^ *\d+ ([DP. ]+)$", shown(next(scenes(num_slots)), width, height))
        assert sum(len(row.replace(" ", "")) for row in rows) == num_slots


def test_a_lost_server_is_said_in_red_and_the_rest_is_grey():
    _, lost, *_ = scenes(8)
    lines = view(lost, 120, 40)
    assert "UNREACHABLE" in lines[0].plain
    assert "no answer from there" in lines[1].plain
    assert {str(line.style) for line in lines[2:]} == {"bright_black"}
    assert {str(span.style) for line in lines[2:] for span in line.spans} <= {"bold red"}


def test_why_there_are_no_seats_is_said():
    _, _, closed, *_ = scenes(8)
    text = shown(closed, 120, 40)
    assert "seats are not told: not for you" in text
    assert "8 of 8 busy" in text


# The program.


def test_no_server(slotwise):
    for words in (["--once"], [], ["--json", "--once"]):
        done = slotwise("top", "--server", "127.0.0.1:1", *words)
        assert done.code == 3
        assert done.err.startswith("error: no answer from 127.0.0.1:1")


def test_a_server_that_does_not_tell_its_seats(slotwise, served, monkeypatch):
    """As --no-operator-calls, or a token that is no operator's: the rest is told."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionDeniedError("ListSlots is for operators", grpc.StatusCode.PERMISSION_DENIED)

    monkeypatch.setattr(Client, "slots", refuse)
    done = slotwise("top", "--server", served.address, "--once", "--interval", "0.1")
    assert done.code == 0
    assert "seats are not told: ListSlots is for operators" in done.out
    assert re.search(r"(?m)^seats +\d+ of \d+ busy", done.out)
    done = slotwise("top", "--server", served.address, "--once", "--json", "--interval", "0.1")
    told = json.loads(done.out)
    assert told["no_seats"] == "ListSlots is for operators"
    assert told["figures"]["seats"] is None


def test_a_token_that_is_refused(slotwise, served, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise UnauthenticatedError("no such token", grpc.StatusCode.UNAUTHENTICATED)

    monkeypatch.setattr(Client, "load", refuse)
    assert slotwise("top", "--server", served.address, "--once").code == 4


class Readers:
    """Keeps a server busy: eleven for eight seats. Each begins anew when its answer has ended."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(11)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _read(self, number: int) -> None:
        with Client(self._address) as client:
            while not self._is_over.wait(0.05):
                prompt = f"Story number {number}. " + "Once upon a time. " * (2 + number)
                with contextlib.suppress(SlotwiseError):
                    self._read_one(client, prompt, ANSWER_LEN + 40 * number)

    def _read_one(self, client: Client, prompt: str, num_tokens: int) -> None:
        with client.generate(prompt, max_new_tokens=num_tokens, ignore_eos=True) as stream:
            for _ in stream:
                if self._is_over.is_set():
                    return


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The documentation's picture is of the demo model; tests need nothing that is so slow."""
    if WRITE_FIGURES:
        from slotwise_cli.demo_model import ensure_demo_model

        return ensure_demo_model()
    from checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("top") / "small"
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def port() -> int:
    return fixed_port()


@contextlib.contextmanager
def serving(checkpoint: Path, port: int) -> Iterator[Server]:
    flags = ("--num-slots", str(NUM_SLOTS), "--max-seq-len", str(MAX_SEQ_LEN))
    with running_server(checkpoint, *flags, port=port) as server:
        yield server


def num_busy(screen: str) -> int:
    return len(re.findall(r"(?m)^ +\d+ (?:decode|prefill) ", screen))


def generated_per_s(screen: str) -> float:
    found = re.search(r"generated +([\d.]+)(k?) tok/s", screen)
    return float(found[1]) * (1000 if found[2] else 1) if found else 0.0


def is_full(screen: str) -> bool:
    """All seats busy, others waiting, tokens coming from each of them."""
    waiting = re.search(r"queue +[1-9]\d*/256 .*oldest", screen)
    with_rate = re.findall(r"(?m)^ +\d+ decode .* ([\d.]+) tok/s", screen)
    return (
        num_busy(screen) == NUM_SLOTS
        and waiting is not None
        and generated_per_s(screen) > 0
        and any(float(rate) > 0 for rate in with_rate)
    )


def test_in_a_terminal(checkpoint, port, tmp_path):
    """A server at work, a window that shrinks, a server that dies and comes back, the end."""
    address = f"127.0.0.1:{port}"
    with terminal(tmp_path, 110, 24) as window, contextlib.ExitStack() as ends:
        with serving(checkpoint, port) as server:
            readers = Readers(address)
            ends.callback(readers.stop)
            window.type(f"echo before; slotwise top --interval 0.5 --server {address}", "Enter")
            screen = window.wait(is_full)
            assert "READY" in screen
            assert window.has_alternate_screen()
            pictured(window, 60 if WRITE_FIGURES else 1, FIGURES if WRITE_FIGURES else tmp_path)
            print_once(address)
            window.resize(40, 10)
            small = window.wait(lambda screen: re.search(r"(?m)^ +0 [DP]{8}$", screen))
            assert "READY" in small.splitlines()[0]
            assert "tok/s" in small
            window.resize(110, 24)
            window.wait(is_full)
            window.type("p")
            window.wait(lambda screen: "PAUSED" in screen)
            window.type("p")
            window.wait(lambda screen: "PAUSED" not in screen and is_full(screen))
            server.process.kill()
            lost = window.wait(lambda screen: "UNREACHABLE" in screen)
            # The last that was seen of it.
            assert f"no answer from {address}" in lost
            assert num_busy(lost) == NUM_SLOTS
        with serving(checkpoint, port):
            again = window.wait(lambda screen: "READY" in screen and is_full(screen))
            assert "UNREACHABLE" not in again
            window.type("q")
            window.wait(lambda screen: "before" in screen)
            window.type("echo ended with $?; stty -a | grep -wo -e -icanon -e -echo", "Enter")
            screen = window.wait(lambda screen: "ended with 0" in screen)
            assert not window.has_alternate_screen()
            assert "tok/s" not in screen
            window.type("echo done", "Enter")
            screen = window.wait(lambda screen: "\ndone" in screen)
            assert not re.search(r"(?m)^-(icanon|echo)$", screen)
            readers.stop()


def print_once(address: str) -> None:
    """Into a pipe: one view, in what characters there are; with --json one object."""
    command = [sys.executable, "-m", "slotwise_cli", "top", "--server", address]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80", "TERM": "dumb"}
    done = subprocess.run([*command], check=True, stdout=subprocess.PIPE, env=env)
    assert b"READY" in done.stdout
    assert b"\x1b" not in done.stdout
    assert done.stdout.isascii()
    done = subprocess.run([*command, "--json", "--once"], check=True, stdout=subprocess.PIPE)
    told = json.loads(done.stdout)
    assert told["figures"]["generated_per_s"] > 0
    assert len(told["figures"]["seats"]) == NUM_SLOTS


def pictured(window, num_seconds: int, folder: Path) -> None:
    """The window as docs/figures/top.svg, once it has seen that many seconds."""

    def is_seen(screen: str) -> bool:
        since = re.search(r"last (\d+) s", screen)
        return is_full(screen) and (num_seconds < 5 or bool(since and int(since[1]) >= num_seconds))

    window.wait(is_seen)
    text = Text.from_ansi(window.screen(with_colors=True).rstrip("\n"))
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(text)
    svg = console.export_svg(title="slotwise top", unique_id="top")
    # Its font would come from another host.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )
    (folder / "top.svg").write_text(svg)
