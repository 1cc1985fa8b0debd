"""A real Prometheus over the rules that are shipped, with shorter times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

from clients.toolchains import need
from free_ports import fixed_port

MONITORING = Path(__file__).parents[2] / "docs" / "deploy" / "monitoring"
# Five minutes become three seconds.
SPEED_UP = 100
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}
# It ends what hangs, on a busy machine too.
WAIT_S = 60
_CONFIG = """
global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}
rule_files: [alerts.yml, vllm_names.yml]
scrape_configs:
  - job_name: slotwise
    file_sd_configs: [{files: [targets.json], refresh_interval: 200ms}]
"""


def sped_up(rules: str) -> str:
    """The rules with every `for` and every window shorter."""

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) * _UNITS_MS[found[3]] // SPEED_UP}ms"

    return re.sub(r"(\bfor: |\[)(\d+)([smh])\b", shorter, rules)


class Prometheus:
    """Scrapes the targets that it is given, and tells which alerts fire."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._url = f"http://127.0.0.1:{port}"
        self._targets: list[str] = []

    def watch(self, address: str) -> None:
        """host:port, from now on."""
        self._targets.append(address)
        ready = self._folder / "targets.new"
        ready.write_text(json.dumps([{"targets": self._targets}]))
        ready.rename(self._folder / "targets.json")

    async def ask(self, path: str) -> dict:
        """`data` of the answer of the API."""

        def get() -> dict:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=30) as answer:
                return json.load(answer)["data"]

        return await asyncio.to_thread(get)

    async def firing(self, address: str) -> set[str]:
        """Names of the alerts that fire for a target now."""
        alerts = (await self.ask("alerts"))["alerts"]
        return {
            one["labels"]["alertname"]
            for one in alerts
            if one["state"] == "firing" and one["labels"]["instance"] == address
        }

    async def query(self, expression: str) -> list[dict]:
        quoted = urllib.request.quote(expression)
        return (await self.ask(f"query?query={quoted}"))["result"]


@contextlib.asynccontextmanager
async def running_prometheus(folder: Path) -> AsyncIterator[Prometheus]:
    program = need("prometheus", "prometheus")
    for name in ("alerts.yml", "vllm_names.yml"):
        (folder / name).write_text(sped_up((MONITORING / name).read_text()))
    (folder / "prometheus.yml").write_text(_CONFIG)
    (folder / "targets.json").write_text("[]")
    port = fixed_port()
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    running = Prometheus(folder, port)
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                assert process.returncode is None, (folder / "log").read_text()
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    await running.ask("alerts")
                    break
                await asyncio.sleep(0.1)
        yield running
    finally:
        process.kill()
        await process.wait()
