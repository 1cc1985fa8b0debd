"""HAProxy as users start it: docs/deploy/haproxy/haproxy.cfg, with the test's own addresses."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.toolchains import need
from free_ports import fixed_port

from chaos.balancer import _listens
from chaos.service import poll

CONFIG = Path(__file__).resolve().parents[2] / "docs" / "deploy" / "haproxy" / "haproxy.cfg"
WAIT_S = 60


def need_haproxy() -> None:
    """Skips without it; fails where everything has to be there."""
    need("haproxy", "haproxy")


@dataclass
class Balancer:
    """A running one."""

    address: str
    stats_url: str

    def up(self) -> set[str]:
        """Replicas that get new requests."""
        return {row["svname"] for row in self._servers() if row["status"].startswith("UP")}

    def num_requests(self) -> dict[str, int]:
        """By replica, since the start."""
        return {row["svname"]: int(row["stot"]) for row in self._servers()}

    def wait_up(self, *names: str) -> None:
        """Until these and no others get new requests."""
        poll(lambda: self.up() == set(names), WAIT_S, f"only {names} up")

    def _servers(self) -> list[dict[str, str]]:
        with urllib.request.urlopen(f"{self.stats_url}/;csv", timeout=WAIT_S) as answer:
            text = answer.read().decode().removeprefix("# ")
        rows = csv.DictReader(io.StringIO(text))
        return [row for row in rows if row["svname"].startswith("replica-")]


@contextlib.contextmanager
def balanced(ports: Sequence[int], folder: Path, text: str | None = None) -> Iterator[Balancer]:
    """Replica N is at the Nth port. `text`: another file than the product's."""
    port, stats = fixed_port(), fixed_port()
    servers = "\n".join(
        f"  server replica-{index} 127.0.0.1:{one} id {index + 1}"
        for index, one in enumerate(ports)
    )
    text = CONFIG.read_text() if text is None else text
    text, num_places = re.subn(r"(?m)(^  server replica-.*\n)+", servers + "\n", text)
    assert num_places == 1
    text = replaced(text, "bind :50051 proto h2", f"bind 127.0.0.1:{port} proto h2")
    text = replaced(text, "bind 127.0.0.1:8404", f"bind 127.0.0.1:{stats}")
    path = folder / f"haproxy-{port}.cfg"
    path.write_text(text)
    with (folder / "haproxy.log").open("w") as log:
        process = subprocess.Popen(
            ["haproxy", "-db", "-f", str(path)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        poll(lambda: _listens(port) or process.poll() is not None, WAIT_S, "haproxy listens")
        assert process.poll() is None, (folder / "haproxy.log").read_text()
        yield Balancer(f"127.0.0.1:{port}", f"http://127.0.0.1:{stats}")
    finally:
        process.kill()
        process.wait()


def replaced(text: str, old: str, new: str) -> str:
    """What is not there was not tested."""
    assert text.count(old) >= 1, old
    return text.replace(old, new)
