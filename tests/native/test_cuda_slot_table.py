"""The slot table on the GPU: every step moves it on as a plain model of it does."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from device_slots import ALWAYS, ONCE, DeviceSlots
from torch import Tensor

pytestmark = pytest.mark.gpu

VOCAB = 70
IDS = [0, 1, 30, 31, 32, 33, 63, 64, 69]  # about the borders of the words of end ids
CORRUPTED = -1
NO_PART = -2


@dataclass
class Slot:
    """`length` tokens are in the cache, `last_token` was sampled after them."""

    length: int
    last_token: int
    active: bool
    scheduled: int
    max_len: int
    end_ids: set[int]

    @property
    def row(self) -> tuple[int, int]:
        """row_token and row_position."""
        return (self.last_token, self.length) if self.active and self.scheduled else (-1, -1)

    def accept(self, token: int) -> None:
        """The token drawn after `length` tokens; it needs a place of its own to be decoded."""
        if self.scheduled == ONCE:
            self.scheduled = 0
        if token == CORRUPTED:
            self.active = False
        else:
            self.last_token = token
            self.active = token not in self.end_ids and self.length + 1 < self.max_len


Model = list[Slot]


def step(model: Model, chosen: dict[int, int], grows: bool) -> list[int]:
    """Takes each row's token, by slot; the step's row of the ring."""
    for slot, token in chosen.items():
        model[slot].length += grows
        model[slot].accept(token)
    return [chosen.get(slot, NO_PART) for slot in range(len(model))]


def random_model(num_slots: int, generator: torch.Generator) -> Model:
    numbers = torch.randint(0, 1 << 20, (num_slots, 5), generator=generator).tolist()
    return [
        Slot(
            length=a % 50,
            last_token=IDS[b % len(IDS)],
            active=c % 4 > 0,
            scheduled=(a + e) % 3,
            max_len=a % 50 + e % 7,
            end_ids={IDS[(d + i) % len(IDS)] for i in range(d % 3)},
        )
        for a, b, c, d, e in numbers
    ]


def put(model: Model, slots: DeviceSlots) -> None:
    for name in ("last_token", "length", "active", "scheduled", "max_len"):
        slots.put(**{name: [int(getattr(slot, name)) for slot in model]})
    slots.put(row_token=[-9] * len(model), row_position=[-9] * len(model))
    for at, slot in enumerate(model):
        slots.set_end_ids(at, slot.end_ids)


def assert_equal(slots: DeviceSlots, model: Model) -> None:
    rows = list(zip(slots.get("row_token"), slots.get("row_position"), strict=True))
    assert rows == [slot.row for slot in model]
    for name in ("last_token", "length", "active", "scheduled"):
        assert slots.get(name) == [int(getattr(slot, name)) for slot in model]


def random_tokens(count: int, generator: torch.Generator) -> list[int]:
    choices = torch.randint(-1, len(IDS), (count,), generator=generator).tolist()
    return [IDS[choice] if choice >= 0 else CORRUPTED for choice in choices]


def logits_for(tokens: list[int]) -> Tensor:
    """Rows of which greedy sampling takes these tokens; corrupted ones in several ways."""
    logits = torch.randn(len(tokens), VOCAB).clamp(-5, 5)
    for row, token in enumerate(tokens):
        if token >= 0:
            logits[row, token] = 9.0
        else:
            logits[row] = torch.tensor([torch.nan, torch.inf, -torch.inf])[row % 3]
    return logits.cuda()


@pytest.mark.parametrize("num_slots", [1, 8, 33, 1024, 2500])
def test_decode_steps(cuda_ops: Any, num_slots: int, generator: torch.Generator) -> None:
    model, slots = random_model(num_slots, generator), DeviceSlots(num_slots, VOCAB, ring_rows=3)
    put(model, slots)
    cuda_ops.begin_command(slots.table)
    assert_equal(slots, model)
    for count in range(8):
        tokens = random_tokens(num_slots, generator)
        chosen = {at: tokens[at] for at, slot in enumerate(model) if slot.row[1] >= 0}
        others = slots.ring.clone()
        got = slots.sample(cuda_ops, logits_for(tokens))
        assert got == step(model, chosen, grows=True)
        assert_equal(slots, model)
        assert slots.get("counter") == [count + 1]
        others[count % 3] = slots.ring[count % 3]
        assert torch.equal(slots.ring, others)


def test_prompts_end(cuda_ops: Any, generator: torch.Generator) -> None:
    model, slots = random_model(40, generator), DeviceSlots(40, VOCAB)
    put(model, slots)
    cuda_ops.begin_command(slots.table)
    for count in (1, 3, 17, 40):
        rows = torch.randperm(40, generator=generator)[:count].tolist()
        tokens = random_tokens(count, generator)
        got = slots.sample(cuda_ops, logits_for(tokens), rows)
        assert got == step(model, dict(zip(rows, tokens, strict=True)), grows=False)
        assert_equal(slots, model)


@pytest.mark.parametrize("end_id", IDS)
def test_only_an_end_id_ends(cuda_ops: Any, end_id: int) -> None:
    slots = DeviceSlots(VOCAB, VOCAB)
    slots.put(active=[1] * VOCAB, scheduled=[ALWAYS] * VOCAB)
    for slot in range(VOCAB):
        slots.set_end_ids(slot, {end_id})
    cuda_ops.begin_command(slots.table)
    assert slots.sample(cuda_ops, logits_for(list(range(VOCAB)))) == list(range(VOCAB))
    assert slots.get("active") == [int(token != end_id) for token in range(VOCAB)]


def test_a_row_decodes_once_beside_others(cuda_ops: Any) -> None:
    """It stays active, and goes on where a command lists it again."""
    slots = DeviceSlots(3, VOCAB)
    slots.put(active=[1] * 3, length=[4, 5, 6], scheduled=[ALWAYS, ONCE, 0])
    cuda_ops.begin_command(slots.table)
    drawn = [slots.sample(cuda_ops, logits_for([5, 6, 7])) for _ in range(3)]
    assert drawn == [[5, 6, NO_PART], [5, NO_PART, NO_PART], [5, NO_PART, NO_PART]]
    assert slots.get("active") == [1, 1, 1]
    assert slots.get("length") == [7, 6, 6]
    slots.put(scheduled=[0, ONCE, 0])
    cuda_ops.begin_command(slots.table)
    assert slots.get("row_token") == [-1, 6, -1]
    assert slots.get("row_position") == [-1, 6, -1]
    # The end of a prompt elsewhere takes nothing from it.
    assert slots.sample(cuda_ops, logits_for([9]), [2]) == [NO_PART, NO_PART, 9]
    assert slots.sample(cuda_ops, logits_for([1, 2, 3])) == [NO_PART, 2, NO_PART]


def test_a_slot_stops_one_short_of_its_length(cuda_ops: Any) -> None:
    slots = DeviceSlots(6, VOCAB)
    slots.put(length=[10] * 6, max_len=[10, 11, 12, 13, 14, 1], active=[1] * 6)
    slots.put(scheduled=[ALWAYS] * 6)
    cuda_ops.begin_command(slots.table)
    assert slots.sample(cuda_ops, logits_for([5] * 6)) == [5] * 6
    assert slots.get("length") == [11] * 6
    assert slots.get("active") == [0, 0, 0, 1, 1, 0]
    assert slots.get("row_position") == [-1, -1, -1, 11, 11, -1]
    slots.put(length=[10] * 6)
    assert slots.sample(cuda_ops, logits_for([5] * 6), list(range(6))) == [5] * 6
    assert slots.get("active") == [0, 0, 1, 1, 1, 0]


def test_the_counter_wraps_as_32_bits(cuda_ops: Any) -> None:
    slots = DeviceSlots(2, VOCAB, ring_rows=3)
    slots.put(active=[1, 1], scheduled=[ALWAYS, 0], counter=[-1])
    cuda_ops.begin_command(slots.table)
    logits = logits_for([5, 6])
    cuda_ops.sample(slots.table, logits, None, slots.workspace(cuda_ops, 2))
    torch.cuda.synchronize()
    assert slots.ring.tolist() == [[5, NO_PART], [-77, -77], [-77, -77]]  # (2^32 - 1) % 3 is 0
    assert slots.get("counter") == [0]


def test_a_step_is_stamped(cuda_ops: Any) -> None:
    slots = DeviceSlots(3, VOCAB, ring_rows=2)
    slots.put(active=[1, 1, 0], scheduled=[ALWAYS] * 3, last_token=[5, 6, 7])
    weight = torch.randn(VOCAB, 48, device="cuda", dtype=torch.bfloat16)
    cuda_ops.begin_command(slots.table)
    before = 0
    for count in range(3):
        out = torch.full((3, 48), torch.nan, device="cuda")
        tokens = slots.get("row_token")
        cuda_ops.embed_slots(slots.table, weight, 0, out)
        torch.cuda.synchronize()
        time.sleep(0.002)
        slots.sample(cuda_ops, logits_for([8 + count, 9, 9]))
        wanted = [weight[token].float() if token >= 0 else out.new_zeros(48) for token in tokens]
        assert torch.equal(out, torch.stack(wanted))
        start, end = slots.stamps[count % 2].tolist()
        assert before < start
        assert 1_000_000 < end - start < 1_000_000_000
        before = end
