"""`slotwise prepare`: what is missing before servers in containers start, and what to set."""

from __future__ import annotations

import os

import pytest

from slotwise_cli import prepare as module
from slotwise_cli.demo_model import demo_model_dir


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOTWISE_CACHE", str(tmp_path))
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def have(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_a_folder_with_a_model(slotwise, models):
    have(models / "mine")
    done = slotwise("prepare", str(models / "mine"))
    assert (done.code, done.out) == (0, f"model: {models / 'mine'}\n")


def test_a_name_that_is_not_there_is_told_with_those_that_are(slotwise, models):
    have(models / "mine")
    have(models / "another")
    (models / "no-model").mkdir()
    done = slotwise("prepare", str(models / "other"))
    assert done.code == 1
    assert done.err == (
        f"error: {models}/other is not there. Set SLOTWISE_MODEL to the name of a model's folder "
        f"in {models} (it holds: another, mine), and SLOTWISE_MODELS to the folder or volume of "
        "your machine that is mounted there\n"
    )


def test_an_empty_volume_and_a_folder_without_a_model(slotwise, models):
    assert "(it holds no model)" in slotwise("prepare", str(models / "other")).err
    (models / "other").mkdir()
    assert "other holds no config.json. Set" in slotwise("prepare", str(models / "other")).err


def test_no_volume(slotwise, tmp_path):
    done = slotwise("prepare", str(tmp_path / "models" / "mine"))
    assert done.code == 1
    assert f"there is no folder {tmp_path}/models; mount one" in done.err


def test_the_demo_model_is_fetched(slotwise, models, monkeypatch):
    monkeypatch.setattr(module, "ensure_demo_model", lambda report: have(demo_model_dir()))
    assert slotwise("prepare", str(demo_model_dir())).code == 0
    assert (demo_model_dir() / "config.json").is_file()


def test_a_volume_that_may_not_be_written_is_told_with_whose_it_must_be(
    slotwise, models, monkeypatch
):
    def refuse(report):
        raise PermissionError(13, "Permission denied", str(models))

    monkeypatch.setattr(module, "ensure_demo_model", refuse)
    done = slotwise("prepare", str(demo_model_dir()))
    assert done.code == 1
    assert f"user {os.geteuid()} may not write to {models}" in done.err
    assert f"chown {os.geteuid()}" in done.err


def test_a_folder_that_may_not_be_read(slotwise, models, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module.Path, "is_file", refuse)
    done = slotwise("prepare", str(models / "mine"))
    assert f"may not read {models}/mine/config.json" in done.err
    assert "SLOTWISE_USER" in done.err


def test_a_driver(slotwise, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX 580.1\nGCC version: 13\n")
    done = slotwise("prepare", "--gpu")
    assert (done.code, done.out) == (0, "NVIDIA driver: NVRM version: NVIDIA UNIX 580.1\n")


@pytest.mark.parametrize(("release", "code"), [("6.1.0", 1), ("5.15-microsoft-standard-WSL2", 0)])
def test_no_driver(slotwise, tmp_path, monkeypatch, release, code):
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(module.platform, "release", lambda: release)
    done = slotwise("prepare", "--gpu")
    assert done.code == code
    if code:
        assert "no NVIDIA driver" in done.err
        assert "NVIDIA Container Toolkit" in done.err
