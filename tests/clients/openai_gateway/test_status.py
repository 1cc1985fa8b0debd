"""The status page's data: what it says, whom it says it to, and what it costs the server."""

from __future__ import annotations

import asyncio
import dataclasses
import html
import json
import re
from importlib import resources

import grpc
import pytest
from clients.openai_gateway.in_process import gateway_for
from clients.openai_gateway.in_process import served as served_app
from clients.openai_gateway.status_script import SECRET, StatusScript, histogram, load, slots
from clients.raw_http import ask
from clients.scripted_server import scripted_server, status
from free_ports import fixed_port
from google.rpc import code_pb2

from slotwise.v1 import inference_pb2 as pb
from slotwise_client import _protocol as protocol
from slotwise_gateway import status_watch
from slotwise_gateway.app import make_app
from slotwise_gateway.config import Config
from slotwise_gateway.status import History, Sample, shortened

PAGE, DATA = "/status", "/status.json"
UNAVAILABLE = status(code_pb2.UNAVAILABLE, "no workers")
NASTY = "<img src=x onerror=alert(1)>"


def sample(at_s: float, told: pb.GetLoadResponse | None = None, seats=None) -> Sample:
    """As the client reads it. The server's clock runs with the test's."""
    told = told or load()
    told.uptime_ns = int((1000 + at_s) * 1e9)
    answer = pb.ListSlotsResponse(slots=slots() if seats is None else seats)
    return Sample(at_s, protocol.LOAD.read(told), tuple(protocol.SLOTS.read(answer)))


def history(*samples: Sample) -> History:
    made = History()
    for one in samples:
        made.add(one)
    return made


class TestFacts:
    """Without a server."""

    def test_of_one_sample(self):
        """Nothing can be said of a change; latencies are of all since the start."""
        facts = history(sample(0, load(num_generated_tokens=500, num_waiting=2))).facts()
        assert (facts["num_waiting"], facts["epoch"], facts["context_len"]) == (2, 3, 1000)
        assert facts["generated_per_s"] is None
        assert facts["history"] == []
        assert facts["latencies"]["window_s"] is None
        assert facts["latencies"]["time_to_first_token"]["num"] == 4
        assert 0.1 <= facts["latencies"]["time_to_first_token"]["p50_s"] <= 0.2

    def test_rates_are_of_the_last_seconds(self):
        """Not of the minute: a burst is over when it is over."""
        tokens = {0: 0, 10: 1000, 20: 1000, 22: 1100, 24: 1200}
        facts = history(
            *(sample(at_s, load(num_generated_tokens=n)) for at_s, n in tokens.items())
        ).facts()
        assert facts["generated_per_s"] == 50
        assert [one["generated_per_s"] for one in facts["history"]] == [100, 0, 50, 50]
        assert [one["age_s"] for one in facts["history"]] == [14, 4, 2, 0]

    def test_latencies_are_of_the_last_minute(self):
        """What was slow before is no part of it."""
        told = {0: histogram(0, 0, 0, 50), 70: histogram(0, 0, 0, 50), 120: histogram(10, 0, 0, 50)}
        made = history(
            *(
                sample(at_s, load(latencies=pb.Latencies(time_to_first_token=counts)))
                for at_s, counts in told.items()
            )
        )
        found = made.facts()["latencies"]
        assert found["window_s"] == 120
        made.add(
            sample(131, load(latencies=pb.Latencies(time_to_first_token=histogram(10, 0, 0, 50))))
        )
        found = made.facts()["latencies"]
        assert found["window_s"] == 61
        assert found["time_to_first_token"]["num"] == 10
        assert found["time_to_first_token"]["p99_s"] <= 0.1
        assert found["inter_token"] == {"num": 0, "p50_s": None, "p99_s": None}

    def test_only_a_minute_is_kept(self):
        made = history(*(sample(at_s) for at_s in range(300)))
        assert len(made.facts()["history"]) == 60

    @pytest.mark.parametrize("counter", ["num_generated_tokens", "num_steps"])
    def test_counters_that_fall_begin_anew(self, counter):
        before, after = load(**{counter: 100}), load(**{counter: 40})
        facts = history(sample(0, before), sample(1, before), sample(2, after)).facts()
        assert facts["history"] == []
        assert facts["generated_per_s"] is None

    def test_a_later_start_begins_anew(self):
        """Also when all its counters are higher than those of the run before."""
        first, second = sample(0, load(num_steps=1)), sample(5000, load(num_steps=9))
        restarted = dataclasses.replace(second.load, uptime_ns=2_000_000_000_000)
        facts = history(first, dataclasses.replace(second, load=restarted)).facts()
        assert facts["history"] == []

    def test_workers_that_come_back_do_not(self):
        """The epoch rises, and the counters go on."""
        facts = history(
            sample(0, load(num_generated_tokens=1)),
            sample(1, load(num_generated_tokens=31, epoch=4)),
        ).facts()
        assert facts["epoch"] == 4
        assert facts["generated_per_s"] == 30

    def test_seats(self):
        seats = slots(4, "abcdefghijk", "b")
        seats[1].state, seats[1].num_computed_tokens = pb.SLOT_STATE_PREFILL, 25
        seats[3].num_cached_tokens = 60
        made = history(sample(0, load(4), slots(4, "abcdefghijk", generated=10)))
        made.add(sample(1, load(4), slots(4, "abcdefghijk", generated=40)))
        seats[0].generated_tokens = 90
        made.add(sample(2, load(4), seats))
        first, second, third, fourth = made.facts()["slots"]
        assert first["request"] == "abcdefgh\u2026"
        assert (first["tokens_per_s"], first["progress"]) == (40, 0.19)
        assert (second["state"], second["progress"], second["tokens_per_s"]) == (
            "prefill",
            0.25,
            None,
        )
        assert (third["state"], third["request"], third["progress"]) == ("free", None, None)
        assert fourth["cached_tokens"] == 60

    def test_a_seats_rate_is_its_tenants_own(self):
        """The next one in the seat has fewer tokens, and no rate yet."""
        made = history(sample(0, None, slots(1, "a", generated=90)))
        seats = slots(1, "b", generated=3)
        seats[0].generation = 8
        made.add(sample(1, None, seats))
        assert made.facts()["slots"][0]["tokens_per_s"] is None

    def test_requests_by_their_end(self):
        """Every counter but `accepted` has a line."""
        made = history(sample(0, load(requests=pb.RequestCounters(rejected_full=2))))
        made.add(sample(1, load(requests=pb.RequestCounters(rejected_full=5))))
        ends = {end["name"]: end for end in made.facts()["requests"]}
        assert (ends["rejected_full"]["num"], ends["rejected_full"]["num_lately"]) == (5, 3)
        counters = {one.name for one in dataclasses.fields(made.last.load.requests)}
        assert counters - set(ends) == {"accepted"}

    def test_an_empty_server_is_told(self):
        """No division by nothing."""
        facts = history(sample(0, pb.GetLoadResponse(), [])).facts()
        assert json.loads(json.dumps(facts, allow_nan=False))["slots"] == []

    def test_ids_are_shortened(self):
        assert shortened("12345678") == "12345678"
        assert shortened("123456789") == "12345678\u2026"


@pytest.fixture
def script():
    return StatusScript()


@pytest.fixture
def served(script):
    with scripted_server(script) as server:
        yield server


@pytest.fixture
async def gateway(served):
    async with gateway_for(served.address) as (gateway, address):
        yield gateway, address


@pytest.fixture
def address(gateway):
    return gateway[1]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_the_data(address, script):
    script.load = load(8, 2, num_waiting=3, oldest_waiting_ns=1_500_000_000)
    script.slots = slots(8, "a-long-request-id", "b")
    answer = await ask(address, "GET", DATA)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert (answer.json["state"], answer.json["model"]) == ("ready", "script")
    assert answer.json["is_old"] is False
    facts = answer.json["facts"]
    assert (facts["num_running"], facts["num_waiting"]) == (2, 3)
    assert facts["oldest_waiting_s"] == 1.5
    assert [seat["state"] for seat in facts["slots"]] == ["decode"] * 2 + ["free"] * 6
    assert [rank["is_up"] for rank in facts["ranks"]] == [True]


async def test_whole_ids_are_in_nothing_that_is_served(address, script):
    script.slots = slots(8, "a-long-request-id")
    for path in (PAGE, DATA):
        body = (await ask(address, "GET", path)).body.decode()
        assert "a-long-r" in body
        assert "a-long-re" not in body


async def test_a_hundred_pages_cost_the_server_one(address, script, monkeypatch):
    monkeypatch.setattr(status_watch, "PERIOD_S", 1000.0)
    answers = await asyncio.gather(*(ask(address, "GET", DATA) for _ in range(100)))
    assert {answer.status for answer in answers} == {200}
    assert (script.num_loads, script.num_lists) == (1, 1)


async def test_nobody_looks_nothing_is_asked(address, script, monkeypatch):
    """Only a question starts a call, however long ago the last one was."""
    monkeypatch.setattr(status_watch, "PERIOD_S", 0.0)
    await ask(address, "GET", DATA)
    await asyncio.sleep(0.3)
    assert (script.num_loads, script.num_lists) == (1, 1)
    await ask(address, "GET", DATA)
    assert (script.num_loads, script.num_lists) == (2, 2)


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (pb.SERVER_STATE_STARTING, "starting"),
        (pb.SERVER_STATE_RECOVERING, "recovering"),
        (pb.SERVER_STATE_DRAINING, "draining"),
        (pb.SERVER_STATE_DOWN, "down"),
        (pb.SERVER_STATE_UNSPECIFIED, "ready"),
    ],
)
async def test_states(address, script, state, word):
    """A server that tells none is what its health says."""
    script.load = load(state=state)
    report = (await ask(address, "GET", DATA)).json
    assert report["state"] == word
    assert report["words"]
    page = (await ask(address, "GET", PAGE)).body.decode()
    assert f"{word}: {report['words']}" in page


async def test_a_server_that_is_not_there():
    config = Config(server=f"127.0.0.1:{fixed_port()}")
    async with served_app(make_app(config), config) as address:
        report = (await ask(address, "GET", DATA)).json
        page = await ask(address, "GET", PAGE)
    assert (report["state"], report["facts"], report["is_old"]) == ("unreachable", None, False)
    assert page.status == 200
    assert b"unreachable: the model&#x27;s server does not answer" in page.body


async def test_a_server_that_fails_leaves_its_last_values(address, script, monkeypatch):
    monkeypatch.setattr(status_watch, "PERIOD_S", 0.0)
    script.load = load(num_waiting=7)
    await ask(address, "GET", DATA)
    script.error = UNAVAILABLE
    report = (await ask(address, "GET", DATA)).json
    assert (report["state"], report["is_old"]) == ("unreachable", True)
    assert report["facts"]["num_waiting"] == 7
    assert b" old.</p>" in (await ask(address, "GET", PAGE)).body
    script.error = None
    report = (await ask(address, "GET", DATA)).json
    assert (report["state"], report["is_old"]) == ("ready", False)


async def test_a_gateway_that_drains_says_so(gateway):
    gateway[0].drain()
    report = (await ask(gateway[1], "GET", DATA)).json
    assert report["is_gateway_draining"] is True
    assert b"shuts down" in (await ask(gateway[1], "GET", PAGE)).body


@pytest.mark.parametrize(
    "refusal",
    [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED],
)
async def test_slots_that_are_not_told(address, script, refusal):
    script.load, script.slots = load(8, 5), (refusal, "for operators")
    report = (await ask(address, "GET", DATA)).json
    assert report["facts"]["slots"] is None
    assert report["facts"]["num_running"] == 5
    assert "operators" in report["slots_note"]
    assert html.escape(report["slots_note"]) in (await ask(address, "GET", PAGE)).body.decode()


async def test_who_is_told_nothing(address, script):
    """Without the right token: no fact, in data and page, also after somebody else was told."""
    script.wants = SECRET
    for headers in ({}, bearer("wrong"), {"Authorization": "Basic YTpi"}):
        told = await ask(address, "GET", DATA, None, bearer(SECRET))
        assert told.json["facts"]["num_slots"] == 8
        answer = await ask(address, "GET", DATA, None, headers)
        assert answer.status == 401
        assert answer.error["code"] == "invalid_api_key"
        page = await ask(address, "GET", PAGE, None, headers)
        assert page.status == 200
        assert b"<table>" not in page.body.partition(b"</noscript>\n<div id")[0]
    page = await ask(address, "GET", PAGE, None, bearer(SECRET))
    assert b"<caption>Seats</caption>" in page.body


async def test_each_caller_sees_what_the_server_tells_it(address, script):
    """An operator's slots are not another's, however short ago they were asked for."""
    script.slots = slots(8, "of-somebody")
    told = await ask(address, "GET", DATA, None, bearer("operator"))
    assert told.json["facts"]["slots"][0]["request"] == "of-someb\u2026"
    script.slots = (grpc.StatusCode.PERMISSION_DENIED, "for operators")
    told = await ask(address, "GET", DATA, None, bearer("tenant"))
    assert told.json["facts"]["slots"] is None
    assert set(script.tokens) == {"Bearer operator", "Bearer tenant"}


async def test_a_token_that_is_revoked_is_told_nothing(address, script, monkeypatch):
    """Not even the values that it has seen."""
    monkeypatch.setattr(status_watch, "PERIOD_S", 0.0)
    assert (await ask(address, "GET", DATA, None, bearer("a"))).status == 200
    script.wants = SECRET
    assert (await ask(address, "GET", DATA, None, bearer("a"))).status == 401
    script.wants, script.error = None, UNAVAILABLE
    assert (await ask(address, "GET", DATA, None, bearer("a"))).json["facts"] is None


async def test_the_gateways_own_token_is_for_those_who_bring_none(served, script):
    script.wants = SECRET
    async with gateway_for(served.address, token=SECRET) as (_, address):
        assert (await ask(address, "GET", DATA)).json["facts"]["num_slots"] == 8
        assert (await ask(address, "GET", DATA, None, bearer("wrong"))).status == 401


async def test_histories_are_bounded(gateway, monkeypatch):
    """Callers beyond the bound are answered, and those who left are forgotten."""
    monkeypatch.setattr(status_watch, "MAX_WATCHES", 2)
    board = status_watch.Board(gateway[0])
    for token in ("a", "b", "c"):
        assert (await board.report(token)).fields["facts"]["num_slots"] == 8
    assert sorted(board._watches) == ["a", "b"]
    monkeypatch.setattr(status_watch, "KEPT_S", -1.0)
    await board.report("c")
    assert sorted(board._watches) == ["c"]


async def test_nothing_of_a_caller_is_html(address, script):
    script.slots = slots(8, NASTY)
    page = (await ask(address, "GET", PAGE)).body.decode()
    assert "<img" not in page
    assert "&lt;img src" in page
    data = await ask(address, "GET", DATA)
    assert data.headers["x-content-type-options"] == "nosniff"


async def test_headers(address):
    for path in (PAGE, DATA, "/"):
        headers = (await ask(address, "GET", path)).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
    page = await ask(address, "GET", PAGE)
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    for part in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"):
        assert part in policy
    assert "unsafe" not in policy
    assert page.headers["content-type"] == "text/html; charset=utf-8"


async def test_the_first_path_leads_to_the_page(address):
    answer = await ask(address, "GET", "/")
    assert (answer.status, answer.headers["location"]) == (307, "status")


async def test_the_page_is_one_file(address):
    """No address of anything else is in it."""
    page = (await ask(address, "GET", PAGE)).body.decode()
    assert re.findall(r"""(?:src|href)=["']?([^"'\s>]+)""", page) == ["data:,", "status.json"]
    assert "://" not in page
    assert "@import" not in page
    assert "url(" not in page


def test_its_parts_are_in_the_package():
    """An installed wheel has them: they lie beside the modules."""
    folder = resources.files("slotwise_gateway")
    for name in ("status.html", "status.css", "status.js"):
        assert (folder / name).is_file()


async def test_replicas_behind_a_balancer_are_not_taken_for_one(served, script):
    """The page tells whether they take requests, and nothing of one of them."""
    async with gateway_for(served.address, balanced=True) as (_, address):
        report = (await ask(address, "GET", DATA)).json
        page = (await ask(address, "GET", PAGE)).body.decode()
    assert (report["state"], report["facts"]) == ("ready", None)
    assert report["note"] in page
    assert script.num_loads == 0


async def test_it_can_be_switched_off(served):
    async with gateway_for(served.address, status_page=False) as (_, address):
        for path in ("/", PAGE, DATA):
            assert (await ask(address, "GET", path)).status == 404
        assert (await ask(address, "GET", "/health")).status == 200
