from __future__ import annotations

from dataclasses import fields

import pytest

from slotwise.v1 import inference_pb2 as pb
from slotwise_client import (
    Accepted,
    Counters,
    Delta,
    Finished,
    FinishReason,
    Load,
    ModelInfo,
    Sampling,
    SelfTest,
    ServerInfo,
    Slot,
    SlotState,
    Timings,
    Usage,
    Worker,
)
from slotwise_client._responses import event, mirror

MIRRORS = [
    (Sampling, pb.SamplingParams),
    (ModelInfo, pb.GetModelInfoResponse),
    (SelfTest, pb.SelfTest),
    (Worker, pb.WorkerInfo),
    (ServerInfo, pb.GetServerInfoResponse),
    (Counters, pb.RequestCounters),
    (Load, pb.GetLoadResponse),
    (Slot, pb.Slot),
    (Usage, pb.Usage),
    (Timings, pb.Timings),
]


@pytest.mark.parametrize(("cls", "message"), MIRRORS)
def test_no_field_of_the_protocol_is_left_out(cls, message):
    assert {f.name for f in fields(cls)} == {f.name for f in message.DESCRIPTOR.fields}


@pytest.mark.parametrize(("cls", "message"), MIRRORS)
def test_an_empty_message_can_be_read(cls, message):
    mirror(cls, message())


def test_presence_becomes_none_and_zero_stays_zero():
    assert mirror(Sampling, pb.SamplingParams(top_k=0)).top_k == 0
    assert mirror(Sampling, pb.SamplingParams()).top_k is None
    assert mirror(Slot, pb.Slot()).request_id is None


@pytest.mark.parametrize("state", list(SlotState))
def test_slot_states(state):
    number = pb.SlotState.Value(f"SLOT_STATE_{state.name}")
    assert mirror(Slot, pb.Slot(state=number)).state is state


def test_a_state_of_a_newer_server_is_unspecified():
    message = pb.Slot.FromString(b"\x18\x63")  # field 3, number 99
    assert mirror(Slot, message).state is SlotState.UNSPECIFIED


def test_nested_messages_are_read():
    worker = pb.WorkerInfo(rank=3, self_tests=[pb.SelfTest(name="rows", passed=True)])
    info = mirror(ServerInfo, pb.GetServerInfoResponse(workers=[worker]))
    assert info.workers[0].rank == 3
    assert info.workers[0].self_tests == (SelfTest("rows", True, ""),)


def test_events_of_a_stream():
    assert event(pb.GenerateResponse(request_id="r", accepted=pb.Accepted(seed=4))) == Accepted(
        "r", 0, 4, 0
    )
    delta = pb.Delta(index=1, first_token_index=6, token_ids=[8, 9], text="ab")
    assert event(pb.GenerateResponse(request_id="r", delta=delta)) == Delta("r", 1, 6, (8, 9), "ab")
    assert event(pb.GenerateResponse(request_id="r")) is None


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_reasons(reason):
    number = pb.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    got = event(pb.GenerateResponse(finished=pb.Finished(finish_reason=number)))
    assert isinstance(got, Finished)
    assert got.finish_reason is reason


@pytest.mark.parametrize(
    ("finished", "matched"),
    [
        (pb.Finished(), None),
        (pb.Finished(matched_token_id=0), 0),
        (pb.Finished(matched_stop_string="END"), "END"),
    ],
)
def test_what_stopped_generation(finished, matched):
    got = event(pb.GenerateResponse(finished=finished))
    assert isinstance(got, Finished)
    assert got.matched_stop == matched
