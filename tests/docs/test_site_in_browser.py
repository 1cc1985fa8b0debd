"""The built site in a browser: it is searched without a server of others, and asks nobody else."""

from __future__ import annotations

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from clients.openai_gateway.pages import browser
from docs.blocks import ROOT
from docs.site import build

SEARCH = """
  const box = document.querySelector('input.md-search__input');
  box.focus(); box.value = arguments[0];
  box.dispatchEvent(new Event('input', {bubbles: true}));
  box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_it_is_read_and_searched(address, tmp_path):
    with browser(tmp_path) as page:
        for name, dark in (("concepts", False), ("scaling", True)):
            page.look(dark=dark)
            page.open(f"{address}{name}.html")
            page.until_text("h1", name.capitalize())
            pictures = "return [...document.images].every((one) => one.naturalWidth > 0)"
            page.until(lambda pictures=pictures: page.run(pictures), f"the pictures of {name}")
        page.run(SEARCH, "consistent hash")
        page.until_text(".md-search-result__list", "Scaling")
        assert page.errors() == []
        asked = {url for url in page.requested() if url.startswith("http")}
        assert f"{address}scaling.html" in asked
        assert {url for url in asked if not url.startswith(address)} == set()
