"""Hooks of MkDocs: pages that lie outside docs/, folders in the navigation, links between them.

A page keeps the links that work in the repository. The hook turns those to other pages into links
of the site, and those to sources, which the site does not have, into their words alone.
"""

import logging
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ("python", "go", "node", "java", "cpp", "rust", "openai_gateway")
# Pages by their file in the repository: where they stand in the site.
OUTSIDE = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    **{f"clients/{name}/README.md": f"clients/{name}.md" for name in CLIENTS},
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)

# MkDocs counts what is warned of under its name; with --strict that ends the build.
_log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Folders of the navigation become their pages."""
    config.nav = [_expanded(entry) for entry in config.nav or ()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere; README.md's place is that of the own home page."""
    for source, page in OUTSIDE.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links as the site has them, outside of code."""
    source = Path(os.path.relpath(page.file.abs_src_path or "", ROOT)).as_posix()

    def linked(match: re.Match[str]) -> str:
        return _linked(match, source, page.file.src_uri)

    return _outside_code(markdown, lambda text: LINK.sub(linked, text))


def _expanded(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    ((title, inside),) = entry.items()
    if isinstance(inside, list):
        return {title: [_expanded(one) for one in inside]}
    if not inside.endswith("/"):
        return entry
    elsewhere = [page for page in OUTSIDE.values() if page.startswith(inside)]
    own = sorted((ROOT / "docs" / inside).glob("*.md"))
    return {title: elsewhere + [path.relative_to(ROOT / "docs").as_posix() for path in own]}


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join(parts) + change(markdown[end:])


def _linked(match: re.Match[str], source: str, page: str) -> str:
    """`source`: the page's file in the repository; `page`: the same in the site."""
    mark, words, link = match.groups()
    path, _, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return match[0]
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / wanted).exists():
        _log.warning("%s: %s leads nowhere", source, link)
        return match[0]
    there = _page_of(wanted)
    if there is None:
        return words
    way = posixpath.relpath(there, posixpath.dirname(page) or ".")
    return f"{mark}[{words}]({way}{'#' + anchor if anchor else ''})"


def _page_of(wanted: str) -> str | None:
    """The page or picture of the site that a file of the repository is; None: it has none."""
    for one in (wanted, f"{wanted}/README.md"):
        if one in OUTSIDE:
            return OUTSIDE[one]
    is_file = os.path.isfile(ROOT / wanted)
    return wanted.removeprefix("docs/") if wanted.startswith("docs/") and is_file else None
