"""Messages of the Run stream to a worker: what a broken or hostile scheduler could send it."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from fuzz.bodies import drawn, flipped, rewired
from fuzz.report import Report, resident_bytes
from google.protobuf.message import DecodeError
from worker_driver import Driver

from checkpoints import VOCAB_SIZE, make_checkpoint
from slotwise.worker.v1 import worker_pb2 as pb
from worker.errors import ProtocolError, SetupError
from worker.executor import Executor
from worker.server import _rank_setup, _step_command

MAX_SEQ_LEN = 64
MASK = b"\xff" * (VOCAB_SIZE // 8)
SETUP = pb.SlotSetup(
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    seed=3,
    end_token_ids=[2],
    max_len=30,
    num_logprobs=2,
    num_prompt_logprobs=1,
    decode_row=2,
    adjustment=pb.LogitAdjustment(
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        prompt_token_ids=[4, 5],
        generated_token_ids=[7],
        bias_token_ids=[3, 9],
        biases=[1.0, -2.0],
        min_len=3,
    ),
)
PLAIN = pb.SlotSetup(top_p=1.0, max_len=MAX_SEQ_LEN)


def first(slot: int, setup: pb.SlotSetup, generation: int = 1, **fields) -> pb.Row:
    """A new tenant of the slot, whose decode row is that of its number."""
    own = pb.SlotSetup()
    own.CopyFrom(setup)
    own.decode_row = slot
    chunk = pb.PrefillChunk(setup=own, **{"token_ids": [4, 5, 6], "sample": True, **fields})
    return pb.Row(slot=slot, generation=generation, prefill=chunk)


def step(step_id: int, *rows: pb.Row, num_steps: int = 1) -> pb.RunRequest:
    return pb.RunRequest(
        step=pb.StepCommand(epoch=1, step_id=step_id, num_steps=num_steps, rows=rows)
    )


def decode(slot: int) -> pb.Row:
    return pb.Row(slot=slot, generation=1, decode=pb.DecodeRow())


# Slot 0 decodes, slot 1 is within its prompt, slots 2 and 3 were not taken yet.
BEGIN = step(1, first(0, PLAIN), first(1, PLAIN, sample=False))
NEXT = pb.Row(slot=1, generation=1, prefill=pb.PrefillChunk(start=3, token_ids=[9]))
COPY = pb.Prefix(source_slot=0, source_generation=1, length=2)
GOOD = [
    step(2, decode(0), num_steps=4),
    step(2, decode(0), NEXT),
    step(2, first(2, SETUP)),
    step(2, first(3, PLAIN, start=2, prefix=COPY)),
    step(2, first(0, PLAIN, 2, token_ids=range(3, 60))),
    step(2, pb.Row(slot=2, generation=1, prefill=first(2, SETUP).prefill, allowed_tokens=MASK)),
    pb.RunRequest(configure=pb.Configure(epoch=1, world_size=1, num_slots=4, max_seq_len=64)),
]


def command_bytes(seed: int, number: int) -> bytes:
    rng = random.Random(f"{seed}/command/{number}")
    good = rng.choice(GOOD)
    match rng.randrange(5):
        case 0:
            return flipped(rng, good.SerializeToString())
        case 1:
            return rewired(rng, good.SerializeToString())
        case 2:
            return _changed_inside(rng, good)
        case 3:
            changed = pb.RunRequest()
            changed.CopyFrom(good)
            changed.MergeFrom(drawn(rng, pb.RunRequest.DESCRIPTOR, max_fields=2))
            return changed.SerializeToString()
        case _:
            return rng.randbytes(rng.choice([0, 2, 20, 200]))


def _changed_inside(rng: random.Random, good: pb.RunRequest) -> bytes:
    """One message of it, of whatever depth, with other values in some fields."""
    changed = pb.RunRequest()
    changed.CopyFrom(good)
    part = changed.step if changed.HasField("step") else changed.configure
    while True:
        inner = [
            value if not field.is_repeated else rng.choice(value)
            for field, value in part.ListFields()
            if field.message_type is not None and (not field.is_repeated or value)
        ]
        if not inner or rng.random() < 0.3:
            break
        part = rng.choice(inner)
    part.MergeFrom(drawn(rng, part.DESCRIPTOR, max_fields=2))
    return changed.SerializeToString()


class Worker:
    """A rank, set up as often as is needed."""

    def __init__(self, folder: Path) -> None:
        self._driver = Driver(folder, num_slots=4, max_seq_len=MAX_SEQ_LEN)
        self._begin()

    def _begin(self) -> None:
        runner, limits = self._driver.executor.runner, self._driver.info.limits
        self._executor = Executor(runner, limits, VOCAB_SIZE, 1)
        self._executor.run(_step_command(BEGIN))

    def take(self, data: bytes) -> str:
        """What became of the message; an exception is a fault."""
        try:
            request = pb.RunRequest.FromString(data)
            if request.HasField("configure"):
                _rank_setup(request)
                return "set-up"
            self._executor.run(_step_command(request))
        except DecodeError:
            return "no message"
        except ProtocolError:
            # Nothing was touched.
            self._executor._failed = False
            return "refused"
        except SetupError:
            return "refused"
        self._begin()
        return "run"


def run_commands(seed: int, numbers: range) -> Report:
    """Blocks until all messages of these numbers were taken, in this process."""
    report, started = Report("messages to a worker", seed), time.monotonic()
    slowest = (0.0, b"")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        worker = Worker(make_checkpoint(Path(folder), "llama"))
        before = 0
        for number in numbers:
            data, begun = command_bytes(seed, number), time.monotonic()
            try:
                report.outcomes[worker.take(data)] += 1
            except Exception as error:
                report.faults.append(f"command {number}: {type(error).__name__}: {error!s:.300}")
                report.outcomes["fault"] += 1
                worker = Worker(Path(folder))
            slowest = max(slowest, (time.monotonic() - begun, data[:100]))
            if number == numbers[len(numbers) // 4]:
                before = resident_bytes()
        report.growth_bytes = resident_bytes() - before
    report.count, report.seconds = len(numbers), time.monotonic() - started
    report.notes.append(f"slowest: {slowest[0]:.2f} s, {slowest[1]!r}")
    return report
