from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from scheduler_service import secret_files
from scheduler_service.config import ConfigError
from scheduler_service.secret_files import Reloaded, read_file


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("first")
    return path


def numbers(path: Path) -> str:
    content = read_file(path, is_secret=True).decode()
    if "bad" in content:
        raise ConfigError(f"{path} is bad")
    return content


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match="gone cannot be read: No such file"):
        read_file(tmp_path / "gone", is_secret=False)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_file(tmp_path, is_secret=False)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_secret_that_others_may_read_or_write_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"its mode is {mode:04o}.*chmod o-rwx"):
        read_file(file, is_secret=True)
    assert read_file(file, is_secret=False) == b"first"


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_secret_of_owner_and_group_is_read(file, mode):
    file.chmod(mode)
    assert read_file(file, is_secret=True) == b"first"


def test_a_long_file_is_not_read_to_its_end(file, monkeypatch):
    monkeypatch.setattr(secret_files, "MAX_FILE_BYTES", 4)
    with pytest.raises(ConfigError, match="at most 4 bytes"):
        read_file(file, is_secret=False)


def test_a_bad_file_at_start_is_an_error(file):
    file.write_text("bad")
    with pytest.raises(ConfigError, match="is bad"):
        Reloaded([file], lambda: numbers(file))


def test_what_has_not_changed_is_not_read_again(file):
    reads = []
    reloaded = Reloaded([file], lambda: reads.append(0))
    reloaded.get()
    reloaded.get()
    assert len(reads) == 1


def test_a_change_is_seen_at_the_next_look(file, caplog):
    reloaded = Reloaded([file], lambda: numbers(file))
    file.write_text("second")
    with caplog.at_level(logging.INFO):
        assert reloaded.get() == "second"
    assert f"read again, for it has changed: {file}" in caplog.text


def test_a_file_put_in_its_place_is_seen_although_size_and_time_are_the_same(file, tmp_path):
    reloaded = Reloaded([file], lambda: numbers(file))
    new = tmp_path / "new"
    new.touch(mode=0o600)
    new.write_text("other")
    before = file.stat()
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.rename(file)
    assert reloaded.get() == "other"


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(name)
    link, new = tmp_path / "link", tmp_path / "new"
    link.symlink_to(tmp_path / "one")
    reloaded = Reloaded([link], lambda: numbers(link))
    assert reloaded.get() == "one"
    new.symlink_to(tmp_path / "two")
    new.rename(link)
    assert reloaded.get() == "two"


@pytest.mark.parametrize("how", ["bad", "gone", "open"])
def test_a_bad_change_is_logged_once_and_what_was_stays(file, caplog, how):
    reloaded = Reloaded([file], lambda: numbers(file))
    if how == "bad":
        file.write_text("bad")
    elif how == "gone":
        file.unlink()
    else:
        file.chmod(0o644)
    assert [reloaded.get(), reloaded.get()] == ["first", "first"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "what was read before stays in use" in caplog.text
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text("mended")
    assert reloaded.get() == "mended"


def test_a_change_while_it_is_read_is_seen_the_next_time(file):
    def slow() -> str:
        content = numbers(file)
        if content == "second":
            file.write_text("third")
        return content

    reloaded = Reloaded([file], slow)
    file.write_text("second")
    assert reloaded.get() == "second"
    assert reloaded.get() == "third"


def test_threads_read_a_change_once(file):
    reads: list[int] = []
    reloaded = Reloaded([file], lambda: reads.append(0))
    file.write_text("second")
    threads = [threading.Thread(target=reloaded.get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 2
