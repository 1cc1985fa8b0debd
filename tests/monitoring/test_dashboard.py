"""What the shipped files ask for is there: metrics, labels, runbooks."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from clients.gateways import gateway_beside
from clients.raw_http import ask
from clients.toolchains import need
from monitoring.prometheus import MONITORING, sped_up
from prometheus_client.parser import text_string_to_metric_families
from tokenizer_files import write_model

from integration.front import running_front
from scheduler_service.service import load_model

DOCS = MONITORING.parents[1]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Kinds of what is exposed, as the exposition's text names them.
_METRIC = re.compile(r"\b(slotwise(?:_\w+)?:\w+|slotwise_process_\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\b(?:by|without|ignoring|on) \(([^)]*)\)")
_NO_LABELS_OF_OURS = {"instance", "job", "le"}


def rules(name: str) -> list[dict]:
    groups = yaml.safe_load((MONITORING / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """All that is asked of Prometheus, by where."""
    found = {
        f"panel {panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    }
    for one in DASHBOARD["annotations"]["list"]:
        found[f"annotation {one['name']}"] = one["expr"]
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            found[f"variable {one['name']}"] = one["query"]["query"]
    for rule in rules("alerts.yml"):
        found[rule["alert"]] = rule["expr"]
    for rule in rules("vllm_names.yml"):
        found[rule["record"]] = rule["expr"]
    return found


EXPRESSIONS = expressions()


@pytest.fixture(scope="module")
def exposed(tmp_path_factory) -> dict[str, set[str]]:
    """Labels by the name of each sample of a running server and its gateway."""

    async def scrape() -> bytes:
        folder = tmp_path_factory.mktemp("front")
        model = load_model(write_model(folder), "")
        async with (
            running_front(model, folder) as front,
            gateway_beside(front.address) as gateway,
        ):
            # The counts of routes begin with the first response.
            await ask(gateway.host_port, "GET", "/v1/models")
            return (await ask(gateway.host_port, "GET", "/metrics")).body

    text = asyncio.run(scrape()).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_metric_that_is_asked_for_exists(where, exposed):
    expression = EXPRESSIONS[where]
    metrics = _METRIC.findall(expression)
    assert metrics or "up{" in expression, expression
    for name, matchers in metrics:
        assert name in exposed, f"{name} is not exposed"
        labels = set(re.findall(r"(\w+)\s*[=!]", matchers))
        assert labels <= exposed[name] | _NO_LABELS_OF_OURS, f"{name} has no {labels}"
    known = set().union(*(exposed[name] for name, _ in metrics)) | _NO_LABELS_OF_OURS
    for group in _BY.findall(expression):
        assert {label.strip() for label in group.split(",")} <= known, expression


def test_panels_name_labels_that_there_are(exposed):
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            names = [name for name, _ in _METRIC.findall(target["expr"])]
            known = set().union(*(exposed[name] for name in names)) | _NO_LABELS_OF_OURS
            assert wanted <= known, panel["title"]


def test_every_metric_of_the_server_is_on_the_dashboard_or_said_to_be_elsewhere(exposed):
    """What nobody looks at need not be exposed."""
    shown = " ".join(EXPRESSIONS.values())
    of_the_process = {name for name in exposed if name.startswith(("slotwise_process", "python_"))}
    elsewhere = {"slotwise:build_info", "slotwise:num_slots"}
    bare = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed}
    unseen = {name for name in bare - of_the_process - elsewhere if name not in shown}
    assert unseen == set()


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)


def test_promtool_reads_the_files(tmp_path):
    promtool = need("promtool", "prometheus")
    for command in (
        ["check", "config", MONITORING / "prometheus.yml"],
        ["check", "rules", MONITORING / "alerts.yml", MONITORING / "vllm_names.yml"],
    ):
        done = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_runbook_and_says_what_to_do():
    page = (DOCS / "observability.md").read_text()
    for rule in rules("alerts.yml"):
        assert f"### {rule['alert']}\n" in page, f"no runbook of {rule['alert']}"
        assert rule["labels"]["severity"] in ("page", "warning")
        assert len(rule["annotations"]["description"].split()) > 10


def test_every_metric_is_described_on_the_page(exposed):
    page = (DOCS / "observability.md").read_text()
    bare = {
        re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed if name.startswith("slotwise")
    }
    ours = {name for name in bare if not name.startswith("slotwise_process")}
    described = set(re.findall(r"^\| `(slotwise[\w:]*)(?:\{[^`]*)?`", page, re.MULTILINE))
    assert ours == described


def test_times_are_shortened_everywhere():
    rules = (MONITORING / "alerts.yml").read_text()
    assert not re.search(r"(for: |\[)\d+[smh]\b", sped_up(rules))
    assert sped_up("for: 5m\nx[10s] y[2m]") == "for: 3000ms\nx[100ms] y[1200ms]"


def test_what_compose_mounts_is_there():
    compose = yaml.safe_load((DOCS.parent / "compose.yaml").read_text())
    mounts = compose["services"]["prometheus"]["volumes"]
    folder = next(one.split(":")[0] for one in mounts if ":/etc/prometheus" in one)
    assert (DOCS.parent / folder / "prometheus.yml").samefile(MONITORING / "prometheus.yml")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert all((MONITORING / name).exists() for name in config["rule_files"])


def test_grafana_is_pointed_at_the_dashboard():
    provider = yaml.safe_load((MONITORING / "grafana" / "dashboards.yml").read_text())
    assert Path(provider["providers"][0]["options"]["path"]) == Path("/var/lib/grafana/dashboards")
    assert DASHBOARD["uid"] == "slotwise"
