"""The status page in a browser: what a person sees."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from clients.gateways import Gateway, running_gateway
from clients.openai_gateway.pages import Page, browser
from clients.openai_gateway.status_script import SECRET, StatusScript, load, slots
from clients.scripted_server import scripted_server
from free_ports import fixed_port
from openai import OpenAI, OpenAIError
from selenium.webdriver.common.keys import Keys

from integration.servers import running_server
from slotwise.v1 import inference_pb2 as pb

FIGURES = Path(__file__).resolve().parents[3] / "docs/figures"
NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(tab) -> Iterator[Page]:
    """Nothing of a test may be seen in the console, and nothing but the gateway may be asked."""
    tab.look()
    tab.expected = ()
    tab.errors(), tab.requested()
    yield tab
    errors, requested = tab.errors(), tab.requested()
    tab.open("about:blank")
    assert errors == []
    assert [url for url in requested if not url.startswith(("http://127.0.0.1:", "data:"))] == []


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Gateway, StatusScript]]:
    """A gateway before a server that says what it is told to."""
    with scripted_server(StatusScript()) as server, running_gateway(server.address) as gateway:
        yield gateway, server.script


@pytest.fixture
def script(scripted) -> StatusScript:
    """As new."""
    script = scripted[1]
    script.load, script.slots, script.wants, script.error = load(), slots(), None, None
    return script


@pytest.fixture
def url(scripted) -> str:
    return f"{scripted[0].url}/status"


def figure(name: str, folder: Path) -> Path:
    """Where a picture goes: into the documentation only when it is asked for."""
    return (FIGURES if os.environ.get("SLOTWISE_WRITE_FIGURES") == "1" else folder) / name


@contextlib.contextmanager
def streams(gateway: Gateway, number: int, num_tokens: int = 2000) -> Iterator[None]:
    """So many at all times: each that ends is followed by another."""
    is_over = threading.Event()

    def read(client: OpenAI, model: str, place: int) -> None:
        while not is_over.is_set():
            with (
                contextlib.suppress(OpenAIError),
                client.completions.create(
                    model=model,
                    prompt=f"Act {place}. " + "The curtain rises, and somebody speaks. " * 40,
                    max_tokens=num_tokens + 40 * place,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ) as stream,
            ):
                for _ in stream:
                    if is_over.is_set():
                        break

    with OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        threads = [threading.Thread(target=read, args=(client, model, i)) for i in range(number)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


@contextlib.contextmanager
def pictured(gateway: Gateway) -> Iterator[Gateway]:
    """The gateway itself; for the documentation's pictures, one of the demo model."""
    if os.environ.get("SLOTWISE_WRITE_FIGURES") != "1":
        yield gateway
        return
    from slotwise_cli.demo_model import ensure_demo_model

    folder = ensure_demo_model(lambda _: None)
    with (
        running_server(folder, "--num-slots", "8") as server,
        running_gateway(server.address) as shown,
    ):
        yield shown


def test_seats_fill_while_streams_run(page, gateway, tmp_path):
    """Eight of eleven streams sit, three wait; and all is free again when they are gone."""
    with pictured(gateway) as shown:
        page.open(f"{shown.url}/")
        page.until_text("#num-free", "8 free")
        assert page.driver.current_url == f"{shown.url}/status"
        with streams(shown, 11, 2000 if shown is gateway else 100):
            page.until_text("#waiting", "3")
            page.until_text("#num-decode", "8 decode")
            page.until(lambda: all("tok/s" in seat for seat in page.texts(".seat")), "seats' rates")
            page.until(lambda: page.text("#generated") not in ("-", "0.0"), "tokens")
            page.until(lambda: page.text("#ttft-p50") != "-", "a first token")
            page.until_text("#oldest", "oldest for")
            page.until(lambda: len(page.texts("#ranks tr")) == 1, "a rank")
            assert all("\u2026" in request for request in page.texts(".seat .request"))
            line = page.run(
                "return document.querySelector('#generated-spark .line').getAttribute('d')"
            )
            assert line.count("L") > 0
            if shown is not gateway:
                time.sleep(75)
                page.until(lambda: page.text("#num-prefill")[0] != "0", "a prompt")
            for name, dark in (("status.png", False), ("status-dark.png", True)):
                page.look(1100, page.run("return document.documentElement.scrollHeight"), dark)
                path = figure(name, tmp_path)
                assert page.driver.save_screenshot(str(path))
                assert path.read_bytes().startswith(b"\x89PNG")
        page.until_text("#num-free", "8 free")
        page.until_text("#waiting", "0")
        page.open("about:blank")


def test_a_server_that_is_killed_and_a_gateway_that_leaves(tab, chat_checkpoint):
    """The last values stay, marked as old; what comes back is seen without a click."""
    server_port, port = fixed_port(), fixed_port()
    flags = ("--num-slots", "2", "--threads", "1")
    tab.look()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_server(chat_checkpoint, *flags, port=server_port))
        gateway = stack.enter_context(running_gateway(server.address, port=port))
        tab.open(f"{gateway.url}/status")
        tab.until_text("#state", "ready")
        assert tab.run("return document.querySelector('#banner').hidden")
        server.process.kill()
        tab.until_text("#state", "no answer")
        tab.until_text("#banner", " old.")
        assert tab.run("return document.querySelector('#facts').classList.contains('is-old')")
        assert len(tab.texts(".seat")) == 2
        stack.enter_context(running_server(chat_checkpoint, *flags, port=server_port))
        tab.until_text("#state", "ready")
        tab.until(lambda: tab.run("return document.querySelector('#banner').hidden"), "no banner")

        gateway.stop()
        tab.until_text("#state", "no gateway")
        tab.until_text("#banner", "The gateway does not answer.", " old.", "Next try in ")
        stack.enter_context(running_gateway(server.address, port=port))
        tab.until_text("#state", "ready")
    tab.open("about:blank")


def test_the_token_field(page, url, script):
    """A wrong one is told; a right one opens the page, and stands nowhere but in its memory."""
    script.wants = SECRET
    # Chromium tells of each in the console.
    page.expected = ("401",)
    page.open(url)
    field = "document.querySelector('#token')"
    page.until(lambda: page.run(f"return document.activeElement === {field}"), "the field")
    assert page.run("return document.querySelector('#facts').hidden")
    box = page.driver.switch_to.active_element
    box.send_keys("wrong-0123456789abcdef", Keys.ENTER)
    page.until_text("#token-words", "does not know this token")
    box.send_keys(SECRET, Keys.ENTER)
    page.until_text("#num-free", "8 free")
    assert page.driver.current_url == url
    kept = page.run("return [document.cookie, localStorage.length, sessionStorage.length]")
    assert kept == ["", 0, 0]
    assert SECRET not in page.driver.page_source
    assert page.run(f"return {field}.value") == ""
    page.run("document.querySelector('#forget').click()")
    page.until(lambda: page.run("return document.querySelector('#facts').hidden"), "a lock")


def test_ids_are_text(page, url, script):
    script.slots = slots(8, NASTY)
    page.open(url)
    page.until_text(".seat .request", "<img src")
    page.run("document.querySelector('#seats-details').open = true")
    page.until_text("#seats-table", "<img src")
    assert page.run("return document.images.length") == 0


def test_without_javascript(page, url, script):
    """The same facts, and new ones when the page has read itself again."""
    script.load, script.slots = load(8, 2, num_waiting=41), slots(8, "abc", NASTY)
    page.open(url)
    page.until_text("#waiting", "41")
    page.tell("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(url)
        page.until_text("body", "Without JavaScript", "ready: requests are taken", "41", "abc")
        page.until_text("body", "<img src")
        captions = page.driver.find_elements("css selector", "caption")
        names = [caption.text for caption in captions]
        assert names == ["Server", "Load", "Seats", "Ranks", "How requests ended"]
        assert not page.driver.find_element("id", "app").is_displayed()
        script.load = load(8, 2, num_waiting=42)
        page.until_text("body", "42")
    finally:
        page.tell("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("num_slots", [8, 64, 256])
def test_a_phone_scrolls_down_only(page, url, script, num_slots):
    ids = [f"request-{i:04}" for i in range(num_slots)]
    script.load = load(num_slots, num_slots, num_waiting=1234)
    script.slots = slots(num_slots, *ids, generated=123456)
    page.look(360, 740)
    page.open(url)
    page.until(lambda: len(page.texts(".seat")) == num_slots, "all seats")
    page.run("document.querySelector('#seats-details').open = true")
    page.until(lambda: len(page.texts("#seats-table tr")) == num_slots, "the table")
    assert page.run("return document.documentElement.scrollWidth") <= 360


def test_what_is_written_can_be_read(page, url, script):
    """Each text has a contrast of 4.5 or more, by day and by night; dark is dark."""
    seats = slots(8, "a", "b", "c")
    seats[1].state = pb.SLOT_STATE_PREFILL
    script.slots = seats
    script.load = load(8, 3, ranks=[pb.RankLoad(rank=0), pb.RankLoad(rank=1, is_up=True)])
    page.open(url)
    page.until_text("#num-prefill", "1 prefill")
    page.until_text("#ranks", "down")
    grounds = []
    for dark in (False, True):
        page.look(dark=dark)
        found = page.contrasts()
        assert len(found) > 50
        assert [one for one in found if one[1] < 4.5] == []
        color = page.run("return getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(int(part) for part in color[4:-1].split(",")))
    assert grounds[0] > 600
    assert grounds[1] < 100


def test_states_differ_in_word_and_shape(page, url, script):
    """Colour is not what tells them apart."""
    page.open(url)
    shapes = set()
    for state in ("READY", "RECOVERING", "DRAINING"):
        script.load = load(state=getattr(pb, f"SERVER_STATE_{state}"))
        page.until_text("#state", state.lower())
        shapes.add(page.run("return document.querySelector('#shape').getAttribute('d')"))
    assert len(shapes) == 3


def test_keys_and_readers(page, url, script):
    """The table opens by keyboard; each seat says in words what it shows, in the map too."""
    script.load, script.slots = load(64, 2), slots(64, "abc", "def")
    page.look(**{"prefers-reduced-motion": "reduce"})
    page.open(url)
    page.until(lambda: len(page.texts(".seat")) == 64, "all seats")
    assert "decode" in page.texts(".seat")[0]
    assert "abc" in page.texts(".seat")[0]
    assert (
        page.run("return getComputedStyle(document.querySelector('.fill')).transitionDuration")
        == "0s"
    )
    body = page.driver.find_element("css selector", "body")
    body.send_keys(Keys.TAB)
    assert page.driver.switch_to.active_element.tag_name == "summary"
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: len(page.texts("#seats-table tr")) == 64, "the table")
    nodes = page.tell("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in nodes if not node["ignored"]}
    assert {"status", "main", "heading", "table", "list", "contentinfo"} <= roles
    images = [
        node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == "image"
    ]
    assert any("tokens per second over the last minute" in name for name in images)


def test_seats_that_are_not_told_are_counted(page, url, script):
    script.load = load(8, 5)
    script.slots = (grpc.StatusCode.PERMISSION_DENIED, "for operators")
    page.open(url)
    page.until_text("#slots-note", "operators")
    assert not page.run("return document.querySelector('#slots-note').hidden")
    page.until_text("#num-decode", "5 taken")
    page.until_text("#num-free", "3 free")
    assert page.run("return document.querySelector('#seats').hidden")


def test_nothing_is_asked_while_nobody_can_see(page, url, script):
    """And it goes on when the tab is looked at again."""
    page.open(url)
    page.until_text("#state", "ready")
    asked_before = page.run(
        "window.numAsked = 0; const ask = window.fetch;"
        "window.fetch = (...given) => { window.numAsked += 1; return ask(...given); };"
        "Object.defineProperty(document, 'hidden', {get: () => window.isHidden});"
        "window.isHidden = true; document.dispatchEvent(new Event('visibilitychange'));"
        "return window.numAsked;"
    )
    time.sleep(2)
    assert page.run("return window.numAsked") == asked_before == 0
    page.run("window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'));")
    page.until(lambda: page.run("return window.numAsked") > 1, "questions")
