"""A scripted server whose load the tests of the status page set."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
from clients.scripted_server import Script

from slotwise.v1 import inference_pb2 as pb

SECRET = "secret-0123456789abcdef"


def histogram(*counts: int) -> pb.Histogram:
    """In buckets up to 0.1, 0.2, 0.4, 0.8 s, and one above."""
    counts = (*counts, *[0] * (5 - len(counts)))
    total_s = sum(
        count * bound for count, bound in zip(counts, (0.1, 0.2, 0.4, 0.8, 1), strict=True)
    )
    return pb.Histogram(upper_bounds_s=[0.1, 0.2, 0.4, 0.8], counts=counts, sum_s=total_s)


def load(num_slots: int = 8, num_running: int = 0, **fields) -> pb.GetLoadResponse:
    """Of a server that has been up for a minute and does nothing."""
    given = {
        "state": pb.SERVER_STATE_READY,
        "epoch": 3,
        "uptime_ns": 60_000_000_000,
        "num_slots": num_slots,
        "max_running": num_slots,
        "num_running": num_running,
        "max_total_tokens": num_slots * 1000,
        "latencies": pb.Latencies(
            time_to_first_token=histogram(0, 4), inter_token_latency=histogram(100)
        ),
        "ranks": [
            pb.RankLoad(rank=0, is_up=True, memory_bytes=1 << 30, device_memory_bytes=4 << 30)
        ],
        "requests": pb.RequestCounters(accepted=9, stop=5),
    }
    return pb.GetLoadResponse(**{**given, **fields})


def slots(num_slots: int = 8, *request_ids: str, generated: int = 10) -> list[pb.Slot]:
    """The first ones decode these requests, the others are free."""
    busy = [
        pb.Slot(
            index=index,
            generation=7,
            state=pb.SLOT_STATE_DECODE,
            request_id=request_id,
            prompt_tokens=100,
            generated_tokens=generated,
            num_computed_tokens=100 + generated,
        )
        for index, request_id in enumerate(request_ids)
    ]
    rest = range(len(request_ids), num_slots)
    return [*busy, *(pb.Slot(index=index, state=pb.SLOT_STATE_FREE) for index in rest)]


@dataclass
class StatusScript(Script):
    """`load` and `slots` are what is told next; `slots` may be a status to refuse by.

    With `wants` a call without this token is refused. `num_loads` and `num_lists` count calls.
    """

    load: pb.GetLoadResponse = field(default_factory=load)
    slots: object = field(default_factory=slots)
    wants: str | None = None
    num_loads: int = 0
    num_lists: int = 0

    def GetLoad(self, request, context):  # noqa: N802
        self.num_loads += 1
        self._note(request, context)
        return self.load

    def ListSlots(self, request, context):  # noqa: N802
        self.num_lists += 1
        self._note(request, context)
        if not isinstance(self.slots, list):
            context.abort(*self.slots)
        return pb.ListSlotsResponse(slots=self.slots)

    def _note(self, request, context) -> None:
        super()._note(request, context)
        if self.wants is not None and self.tokens[-1] != f"Bearer {self.wants}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call needs a token")
