"""The documentation's site: it builds without a warning, and needs nothing of other hosts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from docs.blocks import ROOT
from docs.site import build

# What a browser fetches by itself; a link waits for a click.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
FETCHING_LINKS = {"stylesheet", "preload", "preconnect", "dns-prefetch", "icon", "manifest"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Fetches(HTMLParser):
    """Of one page: what is fetched, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in FETCHED:
            self.fetched.append(given.get(FETCHED[tag]) or "")
        elif tag == "link" and FETCHING_LINKS & set((given.get("rel") or "").split()):
            self.fetched.append(given.get("href") or "")
        elif tag == "a":
            self.links.append(given.get("href") or "")


def is_elsewhere(link: str) -> bool:
    return re.match(r"(https?:)?//", link) is not None


def test_nothing_is_fetched_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text()
        assert [one for one in Fetches(text).fetched if is_elsewhere(one)] == [], page
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"url\(['\"]?([^)'\"]+)|@import ['\"]([^'\"]+)", sheet.read_text())
        assert [one for pair in urls for one in pair if is_elsewhere(one)] == [], sheet


def test_fetches_from_elsewhere_are_noticed():
    text = '<script src="//x/y.js"></script><link rel="stylesheet" href="https://x/y.css">'
    text += '<img src="a.png"><a href="https://x">x</a><link rel="canonical" href="https://x">'
    assert [one for one in Fetches(text).fetched if is_elsewhere(one)] == [
        "//x/y.js",
        "https://x/y.css",
    ]


def test_every_link_leads_to_a_file_of_the_site(site):
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in Fetches(page.read_text()).links:
            path = link.partition("#")[0]
            if path and not re.match(r"[a-z]+:", link):
                assert (page.parent / path).resolve().exists(), f"{page.name}: {link}"


def test_pages_of_other_folders_are_there(site):
    for name, words in {
        "architecture.html": "plan_step",
        "changelog.html": "0.1.0",
        "clients/python.html": "AsyncClient",
        "clients/rust.html": "A crate for tokio",
        "adr/0001-scheduler-owns-worker-processes.html": "supervis",
    }.items():
        assert words in (site / name).read_text(), name


def test_the_search_knows_the_pages(site):
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    pages = {entry["location"].partition("#")[0] for entry in found}
    assert {"api.html", "reliability.html", "clients/go.html"} <= pages


def test_marks_are_not_shown(site):
    for page in site.rglob("*.html"):
        shown = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
        assert not re.search(r"(needs|run by): [\w/]+ --", shown), page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("docs/index.md", "(api.md)", "(no-such-page.md)"), "leads nowhere"),
        (("docs/index.md", "(api.md)", "(api.md#no-such-heading)"), "no-such-heading"),
        (("mkdocs.yml", "  - Home: index.md\n", "  - Home: home.md\n"), "home.md"),
        (("mkdocs.yml", "      - Tolerances: tolerances.md\n", ""), "tolerances.md"),
    ],
)
def test_a_fault_fails_the_build(tmp_path, change, said):
    """A link, an anchor, a page that is not there, a page that the navigation leaves out."""
    name, old, new = change
    for path in ROOT.iterdir():
        if path.name not in ("docs", "mkdocs.yml", "build"):
            (tmp_path / path.name).symlink_to(path)
    subprocess.run(["cp", "-r", ROOT / "docs", ROOT / "mkdocs.yml", tmp_path], check=True)
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


def test_the_diagrams_are_those_that_the_script_draws(tmp_path):
    figures = ROOT / "docs" / "figures"
    copied = tmp_path / "diagrams.py"
    copied.write_text((figures / "diagrams.py").read_text())
    subprocess.run([sys.executable, copied], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert len(drawn) == 5
    assert drawn == {path.name: path.read_text() for path in figures.glob("concept-*.svg")}
    for name, text in drawn.items():
        assert "prefers-color-scheme: dark" in text
        assert ElementTree.fromstring(text).tag.endswith("svg"), name
