"""`slotwise serve --launcher ray` without a cluster: what is refused, how workers are started."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
from free_ports import fixed_port

from slotwise_cli.output import CliError, Output
from slotwise_cli.ray_launcher import RayLauncher
from slotwise_cli.serve import check_launcher

HAS_RAY = importlib.util.find_spec("ray") is not None
# Where all tool chains are asked for, a missing one is a failure.
MAY_SKIP = os.environ.get("SLOTWISE_ALL_TOOLCHAINS") != "1"
needs_ray = pytest.mark.skipif(
    not HAS_RAY and MAY_SKIP, reason="no Ray; pip install 'slotwise[ray]'"
)


def test_without_ray_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CliError, match=r"not installed; pip install 'slotwise\[ray\]'") as caught:
        RayLauncher(tmp_path, [], 1, Output(as_json=True))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("launcher", "standby", "ray", "words"),
    [
        ("kubernetes", [], [], "--launcher is 'kubernetes'; local or ray"),
        ("local", [], ["--ray-timeout", "3"], "--ray-timeout does not go with --launcher local"),
        (
            "ray",
            ["--standby-workers", "1"],
            [],
            "--standby-workers does not go with --launcher ray",
        ),
    ],
)
def test_flags_of_another_launcher_are_refused(launcher, standby, ray, words):
    with pytest.raises(CliError, match=words):
        check_launcher(launcher, only_local=standby, only_ray=ray)


def test_flags_of_the_launcher_are_taken():
    check_launcher("local", only_local=["--standby-workers", "1"], only_ray=[])
    check_launcher("ray", only_local=[], only_ray=["--ray-timeout", "3"])


@needs_ray
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "0"], "tp is 0; at least 1"),
        (["--threads", "-1"], "threads is -1; at least 0"),
        (["--ray-address", "ray://10.0.0.1:10001"], "must be a node of the cluster"),
        (["--ray-strategy", "near"], "invalid choice: 'near'"),
        (["--ray-resources", "disk"], "'disk' is no custom resource and its amount, as in disk=1"),
        (["--ray-resources", "GPU=2"], "'GPU=2' is no custom resource"),
        (["--ray-resources", "disk=0"], "'disk=0' is no custom resource"),
    ],
)
def test_settings_that_cannot_be(flags, words, capsys):
    from slotwise_cli.ray_driver import main

    assert main(["--model", "m", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error


@needs_ray
def test_an_address_where_nobody_listens(capsys):
    from slotwise_cli.ray_driver import main

    address = f"127.0.0.1:{fixed_port()}"
    assert main(["--model", "m", "--ray-address", address, "--ray-timeout", "0"]) == 1
    error = capsys.readouterr().err
    assert f"error: no Ray cluster answers at --ray-address {address}: Connection refused" in error


@needs_ray
def test_ranks_of_a_node_see_each_others_gpus_and_each_takes_its_own():
    from slotwise_cli.ray_launch import Launch
    from slotwise_cli.ray_rank import Placed
    from slotwise_cli.ray_ranks import worker_plan

    launch = Launch("/models/m", 2, worker_flags=("--tls-cert", "c.pem"))
    second = Placed(node="n", address="10.0.0.1", host="h", gpus=("5",))
    plan = worker_plan(launch, 0, second, ("3", "5"))
    assert plan.flags == ("--device", "cuda:1", "--tls-cert", "c.pem")
    assert plan.visible_gpus == ("3", "5")
    on_cpu = worker_plan(launch, 4, Placed("n", "10.0.0.1", "h", ()), ())
    assert on_cpu.flags[:4] == ("--device", "cpu", "--threads", "4")
    assert on_cpu.visible_gpus == ()


@needs_ray
def test_log_lines_have_the_schedulers_forms(capsys):
    from slotwise_cli.ray_ranks import Log

    log = Log("warning", "json")
    log.write("INFO", "slotwise.ray", "not this one")
    log.write("ERROR", "slotwise.ray", "two\nlines")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"], line["message"]) == (
        "error",
        "slotwise.ray",
        "two\nlines",
    )
    Log("info", "text").write("INFO", "slotwise.ray", "two\nlines")
    assert capsys.readouterr().err.endswith("Z INFO slotwise.ray: two\\nlines\n")
