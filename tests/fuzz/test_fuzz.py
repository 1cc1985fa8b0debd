"""A small part of `make fuzz`, and that its fuzzers find what is wrong."""

from __future__ import annotations

from fuzz.bodies import Body, BodyMaker, join, split
from fuzz.folder_child import checked, try_folder
from fuzz.folders import FolderMaker, write_folder
from fuzz.good_calls import GENERATE, good_calls
from fuzz.handlers import running_front
from fuzz.in_child import run_in_child
from fuzz.in_process import run_in_process
from fuzz.over_wire import run_over_wire
from fuzz.worker_commands import run_commands
from tokenizer_files import write_model

from scheduler_service.service import load_model
from slotwise.v1 import inference_pb2 as pb
from worker.errors import CheckpointError

SEED = 1


def test_bodies_in_process():
    report = run_in_process(SEED, range(15_000))
    assert report.faults == []
    assert report.outcomes["OK"] > 2000
    assert report.outcomes["INVALID_ARGUMENT"] > 5000
    assert sum(report.outcomes.values()) == 15_000


def test_bodies_over_sockets():
    report = run_over_wire(SEED, range(1000))
    assert report.faults == []
    assert report.outcomes["OK"] > 100
    assert report.outcomes["INVALID_ARGUMENT"] > 300


def test_messages_to_a_worker():
    report = run_commands(SEED, range(3000))
    assert report.faults == []
    assert min(report.outcomes[kind] for kind in ("run", "refused", "no message")) > 200


def test_damaged_folders():
    report = run_in_child(SEED, range(100))
    assert report.faults == []
    assert report.outcomes["worker refuses"] > 40
    assert min(report.outcomes[kind] for kind in ("front refuses", "front loads")) > 4


def test_a_body_follows_from_its_number():
    first, again = (BodyMaker(3, good_calls()) for _ in range(2))
    bodies = [first.body(number) for number in range(200)]
    assert [again.body(number) for number in reversed(range(200))] == bodies[::-1]
    assert len({body.made_by for body in bodies}) >= 6


def test_a_folder_follows_from_its_number(tmp_path):
    first, again = (FolderMaker(3, tmp_path / name) for name in "ab")
    damages = [first.damage(number) for number in range(60)]
    files = [damage.files for damage in damages]
    assert [again.damage(n).files for n in reversed(range(60))] == files[::-1]


def test_fields_are_cut_and_joined():
    for message in GENERATE:
        data = message.SerializeToString()
        assert b"".join(join(*field) for field in split(data)) == data


async def test_a_fault_of_the_server_is_found(tmp_path, monkeypatch):
    model = load_model(write_model(tmp_path), "")
    async with running_front(model, tmp_path) as front:
        monkeypatch.setattr(front.engine, "flush", lambda: 1 / 0)
        flush = pb.FlushCacheRequest().SerializeToString()
        await front.take(Body(7, "/slotwise.v1.Inference/FlushCache", flush, "hand"))
        await front.take(Body(8, "/slotwise.v1.Inference/GetLoad", b"", "hand"))
    model.constraints.close()
    assert front.codes == {"improper": 1, "OK": 1}
    assert front.faults[0].startswith("INTERNAL: body 7 (hand)")
    assert "ZeroDivisionError" in front.faults[1]


def test_a_fault_of_a_folder_is_found(tmp_path, monkeypatch):
    maker = FolderMaker(SEED, tmp_path)
    damage = next(one for one in map(maker.damage, range(99)) if "config.json" in one.files)
    write_folder(tmp_path / "model", maker.good_files(damage), damage)
    monkeypatch.setattr("worker.rank.open_checkpoint", lambda folder: {}["a"])
    assert try_folder(tmp_path / "model", {"config.json"})[0].startswith("FAULT open_by_worker")
    assert checked("refuses", tmp_path, CheckpointError("no")).startswith("FAULT refuses and names")
