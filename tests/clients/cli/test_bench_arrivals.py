"""The commands of docs/benchmarks.md, with a server of their own and less to measure.

slotwise bench arrivals --rates 5,20 --slo-ttft-ms 60000 --json-file a.json --report a.html
slotwise bench interleave --streams 2 --long-tokens 200
"""

from __future__ import annotations

import contextlib
import html.parser
import json
import sys
import threading
import time
from unittest import mock

import pytest
from clients.openai_gateway.pages import browser
from clients.scripted_server import scripted_server

from slotwise_cli.__main__ import main
from slotwise_client import Client

WORDS = ("--duration-s", "1", "--warm-up-s", "0.2", "--repeats", "2")
LENGTHS = ("--prompt-tokens", "4-8", "--output-tokens", "5")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def measured(small_server, files):
    """A report and its JSON, of a real server."""
    pytest.importorskip("matplotlib")
    words = ["--rates", "5,20", *WORDS, *LENGTHS, "--slo-ttft-ms", "60000", "--json-file"]
    words += [str(files / "a.json"), "--report", str(files / "a.html"), "--plot"]
    words += [str(files / "a.png"), "--server", small_server.address]
    argv = mock.patch.object(sys, "argv", ["slotwise", "bench", "arrivals", *words])
    with argv, pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return json.loads((files / "a.json").read_text())


def test_every_request_that_came_is_accounted_for(measured):
    assert measured["kind"] == "arrivals"
    assert measured["complete"]
    assert [point["rate"] for point in measured["rates"]] == [5.0, 20.0]
    rounds = [row for point in measured["rates"] for row in point["rounds"]]
    assert len(rounds) == 4
    for row in rounds:
        assert sum(row["fates"].values()) == pytest.approx(row["sent_per_s"] * 1)
        assert row["goodput_per_s"] == row["fates"]["ended"] == row["ended_per_s"]
    busy = measured["rates"][1]["rounds"][0]
    assert 0 < busy["ttft_ms"]["p50"] <= busy["ttft_ms"]["p99"] <= busy["e2e_ms"]["p99"]
    assert busy["tpot_ms"]["p50"] > 0


class Links(html.parser.HTMLParser):
    """What a page asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("src", "href")]


def test_the_report_needs_nothing_else(measured, files, tmp_path):
    text = (files / "a.html").read_text()
    links = Links(text).found
    assert links
    assert all(link.startswith("data:") for link in links)
    with browser(tmp_path) as page:
        page.open((files / "a.html").as_uri())
        assert "20/s TTFT p99" in page.text("table")
        assert page.run("return document.images[0].naturalWidth") > 100
        assert page.errors() == []
        others = {url for url in page.requested() if not url.startswith(("data:", "chrome:"))}
        assert others == {(files / "a.html").as_uri()}


def test_what_has_no_room_is_told_at_once(slotwise, small_server):
    words = ["bench", "arrivals", "--prompt-tokens", "70000", "--server", small_server.address]
    done = slotwise(*words)
    assert done.code == 2
    assert "has room for" in done.err


def test_requests_that_run_out_of_time_are_misses_and_end(slotwise, served):
    served.script.blocked = True
    words = ["bench", "arrivals", "--rates", "20", "--repeats", "1", "--duration-s", "0.5"]
    words += ["--warm-up-s", "0", *LENGTHS, "--timeout-s", "0.3", "--json"]
    done = slotwise(*words, "--server", served.address)
    assert done.code == 0, done.err
    (point,) = json.loads(done.out)["rates"]
    (row,) = point["rounds"]
    # The script ends the others when the first one is gone: without their tokens, an error.
    fates = row["fates"]
    assert fates["timeout"] >= 1
    assert fates["ended"] == 0
    assert row["goodput_share"] == 0
    assert row["ttft_ms"] is None


def test_a_server_that_is_lost_leaves_an_incomplete_result(slotwise, tmp_path):
    stack = contextlib.ExitStack()
    served = stack.enter_context(scripted_server())
    words = ["bench", "arrivals", "--rates", "10", "--repeats", "20", *LENGTHS]
    words += ["--duration-s", "1", "--warm-up-s", "0", "--server", served.address]

    def stop() -> None:
        until = time.monotonic() + 60
        while len(served.script.requests) < 30 and time.monotonic() < until:
            time.sleep(0.05)
        stack.close()

    stopper = threading.Thread(target=stop)
    stopper.start()
    done = slotwise(*words, "--json-file", str(tmp_path / "a.json"))
    stopper.join()
    assert done.code == 3
    assert "incomplete" in done.err
    kept = json.loads((tmp_path / "a.json").read_text())
    assert not kept["complete"]
    assert kept["incomplete_because"]
    assert kept["rates"][0]["rounds"]
    assert kept["cut_off"]["fates"]["lost"]


def test_streams_beside_a_long_prompt(slotwise, small_server):
    words = ["bench", "interleave", "--streams", "2", "--long-tokens", "200", "--window-s", "0.2"]
    words += ["--repeats", "1", "--room-tokens", "60000", "--server", small_server.address]
    done = slotwise(*words, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    for name in ("ITL before, p99", "ITL during, max", "TTFT of the long prompt"):
        assert result["figures"][name]["median"] > 0
    begin, end = result["timeline"]["long_s"]
    assert 0.1 < begin < end
    with Client(small_server.address) as client:
        wait_until_idle(client)


def wait_until_idle(client: Client) -> None:
    """Nothing runs on: the streams were cancelled."""
    until = time.monotonic() + 60
    while client.load().num_running:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_streams_that_end_too_early_are_told(slotwise, small_server):
    words = ["bench", "interleave", "--streams", "1", "--long-tokens", "20", "--room-tokens", "5"]
    done = slotwise(*words, "--server", small_server.address)
    assert done.code == 1
    assert "ended after 5 tokens" in done.err
