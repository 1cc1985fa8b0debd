"""The manifests: by the published schemas, by what they say of each other, and by our own flags."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import ValidationError

from scheduler_service.config import ConfigError
from scheduler_service.config import parse_arguments as parse_scheduler
from slotwise_gateway.config import parse_arguments as parse_gateway

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
FOLDER = DEPLOY / "kubernetes"
SERVICE = "slotwise.v1.Inference"
NAMESPACE = "slotwise"
PARSERS = {"scheduler_service": parse_scheduler, "slotwise_gateway": parse_gateway}

Manifest = dict[str, Any]


def read_gpu() -> list[Manifest]:
    told = yaml.safe_load((FOLDER / "gpu" / "kustomization.yaml").read_text())
    files = [yaml.safe_load_all((FOLDER / "gpu" / name).read_text()) for name in told["resources"]]
    return [one for each in files for one in each]


def read_cpu() -> list[Manifest]:
    """As kustomize would make them."""
    told = yaml.safe_load((FOLDER / "cpu" / "kustomization.yaml").read_text())
    assert told["resources"] == ["../gpu"]
    made = read_gpu()
    for patch in told["patches"]:
        (one,) = (each for each in made if _is(each, patch["target"]))
        steps = yaml.safe_load(patch["patch"])
        if isinstance(steps, dict):
            assert steps["$patch"] == "delete"
            made.remove(one)
        else:
            for step in steps:
                _apply(one, step)
    return made


def _is(one: Manifest, target: dict[str, str]) -> bool:
    return one["kind"] == target["kind"] and one["metadata"]["name"] == target["name"]


def _apply(one: Any, step: dict[str, Any]) -> None:
    *way, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
    for part in way:
        one = one[int(part)] if isinstance(one, list) else one[part]
    place: Any = int(last) if isinstance(one, list) else last
    if step["op"] == "test":
        assert one[place] == step["value"], step
    elif step["op"] == "remove":
        del one[place]
    else:
        assert step["op"] in ("add", "replace")
        one[place] = step["value"]


READ = {"gpu": read_gpu, "cpu": read_cpu}


def named(made: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in made if one["kind"] == kind}


def workloads(made: list[Manifest]) -> list[Manifest]:
    return [one for one in made if one["kind"] in ("Deployment", "StatefulSet")]


def pod(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def labels(workload: Manifest) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def chosen(made: list[Manifest], selector: dict[str, str]) -> list[Manifest]:
    return [one for one in workloads(made) if selector.items() <= labels(one).items()]


def ports(workload: Manifest) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for container in pod(workload)["containers"]
        for port in container["ports"]
    }


def told(container: Manifest) -> Any:
    """What our own process reads of its arguments."""
    return PARSERS[container["command"][2]](container["args"])


def check(made: list[Manifest]) -> None:
    """All of it; AssertionError or ValidationError for what is wrong."""
    for one in made:
        kubernetes_validate.validate(one, "1.32", strict=True)
    for workload in workloads(made):
        check_workload(made, workload)
    check_selectors(made)
    check_processes(made)


def check_workload(made: list[Manifest], workload: Manifest) -> None:
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels(workload).items()
    spec = pod(workload)
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in spec["volumes"]}
    volumes |= {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            claims = named(made, "PersistentVolumeClaim")
            assert volume["persistentVolumeClaim"]["claimName"] in claims
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["image"] == "slotwise" or ":" in container["image"]
    for container in spec["containers"]:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                check_probe(container, container[probe])
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) in ports(workload).values()


def check_probe(container: Manifest, probe: Manifest) -> None:
    own = {port["name"]: port["containerPort"] for port in container["ports"]}
    (way,) = (probe[kind] for kind in ("grpc", "httpGet", "tcpSocket") if kind in probe)
    assert way["port"] in (own if isinstance(way["port"], str) else own.values())


def check_selectors(made: list[Manifest]) -> None:
    for service in named(made, "Service").values():
        (workload,) = chosen(made, service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports(workload)
            assert ports(workload)[port["targetPort"]] == port["port"]
    for budget in named(made, "PodDisruptionBudget").values():
        assert len(chosen(made, budget["spec"]["selector"]["matchLabels"])) == 1
    policies = named(made, "NetworkPolicy")
    assert policies["nobody"]["spec"]["podSelector"] == {}
    for name, policy in policies.items():
        if name == "nobody":
            assert "ingress" not in policy["spec"]
            continue
        (workload,) = chosen(made, policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= set(ports(workload))
            for source in rule.get("from", ()):
                if set(source) == {"podSelector"}:
                    assert chosen(made, source["podSelector"]["matchLabels"])
    (way_in,) = policies["slotwise"]["spec"]["ingress"][0]["from"]
    assert way_in == {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "haproxy"}}}


def check_processes(made: list[Manifest]) -> None:
    replicas = named(made, "StatefulSet")["slotwise"]
    (container,) = pod(replicas)["containers"]
    config = told(container)
    assert config.host == config.metrics_host == "0.0.0.0"
    assert config.port == ports(replicas)["grpc"]
    assert config.metrics_port == ports(replicas)["metrics"]
    assert pod(replicas)["terminationGracePeriodSeconds"] > config.grace_s + 10
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts[str(config.model_dir.parent)]["readOnly"] is True
    assert mounts[str(config.keeping.journal)]["name"] == "journal"
    num_gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
    engine = config.engine
    assert (engine.device, num_gpus) in (("cuda", engine.world_size), ("cpu", 0))
    for name in ("startupProbe", "readinessProbe"):
        assert container[name]["grpc"] == {"port": config.port, "service": SERVICE}
    assert container["livenessProbe"]["grpc"] == {"port": config.port, "service": ""}
    headless = named(made, "Service")[replicas["spec"]["serviceName"]]
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"] is True

    gateways = named(made, "Deployment")["slotwise-gateway"]
    (container,) = pod(gateways)["containers"]
    gateway = told(container)
    assert gateway.balanced
    assert gateway.port == ports(gateways)["http"]
    assert pod(gateways)["terminationGracePeriodSeconds"] > gateway.grace_s + 10
    name, _, port = gateway.server.partition(":")
    service = named(made, "Service")[name]
    assert int(port) in {one["port"] for one in service["spec"]["ports"]}
    assert chosen(made, service["spec"]["selector"])[0]["metadata"]["name"] == "haproxy"


@pytest.mark.parametrize("overlay", READ)
def test_the_manifests(overlay):
    check(READ[overlay]())


def _leaf(made: list[Manifest], kind: str, name: str, *way: str | int) -> tuple[Any, str | int]:
    place: Any = named(made, kind)[name]
    for part in way[:-1]:
        place = place[part]
    return place, way[-1]


POD = ("spec", "template", "spec")
FIRST = (*POD, "containers", 0)
SET = ("StatefulSet", "slotwise")
WRONG = [
    (*SET, "spec", "serviceName", "elsewhere"),
    (*SET, *POD, "terminationGracePeriodSeconds", 60),
    (*SET, *FIRST, "args", 3, "--port=50052"),
    (*SET, *FIRST, "args", 0, "--modle=/data/models/model"),
    (*SET, *FIRST, "args", 10, "--tp=2"),
    (*SET, *FIRST, "readinessProbe", "grpc", "service", "slotwise.Inference"),
    (*SET, *FIRST, "livenessProbe", "grpc", "service", SERVICE),
    (*SET, *FIRST, "livenessProbe", "grpc", "port", "grpc"),
    (*SET, *FIRST, "volumeMounts", 1, "name", "journals"),
    (*SET, *FIRST, "volumeMounts", 1, "mountPath", "/data/journals"),
    (*SET, *FIRST, "securityContext", "readOnlyRootFileSystem", True),
    (*SET, *FIRST, "securityContext", "readOnlyRootFilesystem", False),
    ("Deployment", "slotwise-gateway", *FIRST, "args", 0, "--server=slotwise:50050"),
    ("Deployment", "slotwise-gateway", *FIRST, "args", 1, "--log-level=info"),
    ("Deployment", "haproxy", *FIRST, "readinessProbe", "tcpSocket", "port", "http"),
    ("Service", "slotwise", "spec", "selector", {"app.kubernetes.io/name": "slotwise"}),
    ("Service", "slotwise", "spec", "ports", 0, "targetPort", "stats"),
    ("PodDisruptionBudget", "slotwise", "spec", "maxUnavailabe", 1),
    ("PodDisruptionBudget", "slotwise", "spec", "selector", "matchLabels", {"app": "slotwise"}),
    ("NetworkPolicy", "slotwise", "spec", "ingress", 0, "ports", 0, "port", "gprc"),
    ("NetworkPolicy", "slotwise", "spec", "ingress", 0, "from", []),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_field_is_found(wrong):
    kind, name, *way, value = wrong
    made = copy.deepcopy(read_gpu())
    place, last = _leaf(made, kind, name, *way)
    place[last] = value
    with pytest.raises((AssertionError, ConfigError, KeyError, ValidationError, ValueError)):
        check(made)


def test_what_kustomize_makes_of_it():
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl; its own words were composed by this test all the same")
    for overlay, read in READ.items():
        command = ["kubectl", "kustomize", str(FOLDER / overlay)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        made = list(yaml.safe_load_all(text))
        wants = {(one["kind"], one["metadata"]["name"]) for one in read()}
        found = {(one["kind"], one["metadata"]["name"]) for one in made}
        extra = found - wants
        assert wants <= found
        assert [kind for kind, _ in extra] == ["ConfigMap"]
        (name,) = (name for _, name in extra)
        volumes = pod(named(made, "Deployment")["haproxy"])["volumes"]
        assert volumes[0]["configMap"]["name"] == name
        (container,) = pod(named(made, "StatefulSet")["slotwise"])["containers"]
        assert container["image"] == f"slotwise:{overlay}"
        ours = pod(named(read(), "StatefulSet")["slotwise"])["containers"][0]
        assert container == {**ours, "image": container["image"]}


def test_haproxy_is_the_same_but_for_its_servers():
    def lines(path: Path) -> list[str]:
        text = path.read_text().replace("bind 127.0.0.1:8404", "bind :8404")
        text = re.sub(r"(?m)^resolvers kube\n(  .*\n)+", "", text)
        kept = [line.strip() for line in text.splitlines()]
        return [line for line in kept if line and not line.startswith(("#", "server "))]

    one, other = DEPLOY / "haproxy" / "haproxy.cfg", FOLDER / "gpu" / "haproxy.cfg"
    assert lines(one) == lines(other)


def test_haproxy_knows_the_pods_by_their_names():
    made = read_gpu()
    replicas = named(made, "StatefulSet")["slotwise"]
    text = (FOLDER / "gpu" / "haproxy.cfg").read_text()
    servers = re.findall(r"(?m)^  server replica-(\d+) (\S+):(\d+) id (\d+) resolvers kube", text)
    assert len(servers) >= replicas["spec"]["replicas"]
    for index, (number, host, port, place) in enumerate(servers):
        assert (int(number), int(place)) == (index, index + 1)
        name = f"{replicas['metadata']['name']}-{index}.{replicas['spec']['serviceName']}"
        assert host == f"{name}.{NAMESPACE}.svc.cluster.local"
        assert int(port) == ports(replicas)["grpc"]
    binds = {int(port) for port in re.findall(r"(?m)^  bind :(\d+)", text)}
    assert binds == set(ports(named(made, "Deployment")["haproxy"]).values())
