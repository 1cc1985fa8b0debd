"""Chromium without a window, for tests of what the gateway shows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clients.toolchains import need
from selenium import webdriver
from selenium.common.exceptions import (
    JavascriptException,
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 60
_GONE = (NoSuchElementException, StaleElementReferenceException, JavascriptException)
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --hide-scrollbars"
)
# Of every text that can be seen: what it says, and the contrast to what is behind it.
_CONTRASTS = """
  const parsed = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = parsed(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility()) continue;
    if (/SCRIPT|STYLE/.test(parent.tagName)) continue;
    const a = light(parsed(getComputedStyle(parent).color)), b = light(behind(parent));
    found.push([node.data.trim(), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
"""


class Page:
    """The one tab of a browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        # Words of errors in the console that the test at hand brings about.
        self.expected: tuple[str, ...] = ()

    def open(self, url: str) -> None:
        self.driver.get(url)

    def look(
        self, width: int = 1100, height: int = 900, dark: bool = False, **features: str
    ) -> None:
        """From here on: the window's size, and what the user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        wanted = {"prefers-color-scheme": "dark" if dark else "light", **features}
        pairs = [{"name": name, "value": value} for name, value in wanted.items()]
        self.tell("Emulation.setEmulatedMedia", features=pairs)

    def tell(self, command: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(command, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """As it is in the document, seen or not."""
        return self.driver.find_element(By.CSS_SELECTOR, selector).get_property("textContent")

    def texts(self, selector: str) -> list[str]:
        found = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return self.run(found, selector)

    def until(self, condition: Callable[[], object], words: str) -> None:
        """Waits; at the end of all patience the whole page is told."""
        try:
            # A page that reads itself again takes its elements along.
            wait = WebDriverWait(self.driver, WAIT_S, 0.1, _GONE)
            wait.until(lambda _: condition())
        except TimeoutException as error:
            seen = self.driver.find_element(By.TAG_NAME, "body").text
            raise AssertionError(f"never: {words}; the page: {seen}") from error

    def until_text(self, selector: str, *wanted: str) -> None:
        """Until it has all these words."""
        condition = lambda: all(words in self.text(selector) for words in wanted)  # noqa: E731
        self.until(condition, f"{wanted} in {selector}")

    def contrasts(self) -> list[tuple[str, float]]:
        return [(text, ratio) for text, ratio in self.run(_CONTRASTS)]

    def errors(self) -> list[str]:
        """Of the console, since the last look, but for those that are expected."""
        told = [
            one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"
        ]
        return [text for text in told if not any(words in text for words in self.expected)]

    def requested(self) -> set[str]:
        """The addresses that were asked for, since the last look."""
        messages = [
            json.loads(one["message"])["message"] for one in self.driver.get_log("performance")
        ]
        return {
            one["params"]["request"]["url"]
            for one in messages
            if one["method"] == "Network.requestWillBeSent"
        }


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """With a profile in this folder. Skips the test where Chromium or its driver is not there."""
    options = webdriver.ChromeOptions()
    options.binary_location = need("chromium", "chromium")
    for flag in _FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={folder}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Named, so that nothing looks for one in the network.
    service = Service(need("chromedriver", "chromium-driver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_page_load_timeout(WAIT_S)
        driver.set_script_timeout(WAIT_S)
        yield Page(driver)
    finally:
        driver.quit()
