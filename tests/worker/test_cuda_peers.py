"""Ranks on GPUs, each a process that runs one of the cases below: this file again, as a program.

SLOTWISE_RANKS_SHARE_GPUS=1 lets ranks take turns on one GPU: slowly, and without NCCL.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from worker import _native
from worker.errors import PeerLostError, StepError
from worker.peers import CudaGroup
from worker.sharding import Part

pytestmark = pytest.mark.gpu

SHARED = os.environ.get("SLOTWISE_RANKS_SHARE_GPUS") == "1"
TYPES = (torch.bfloat16, torch.float16, torch.float32)
INTS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
MAX_TOKENS, HIDDEN, ROWS = 1024, 5120, 16


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = INTS[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.cpu().view(kind), b.cpu().view(kind))


def widths(world_size: int, vocab: int) -> list[Part]:
    bounds = [vocab * rank // world_size for rank in range(world_size + 1)]
    return [Part(*bounds[rank : rank + 2]) for rank in range(world_size)]


class RankCase:
    """A rank of a test, on a stream of its own."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.port = port
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.stream = torch.cuda.Stream(self.device)
        torch.cuda.set_stream(self.stream)
        self.ops = _native.CudaOps(self.device.index, self.stream.cuda_stream)

    def group(
        self,
        timeout_s: float = 60.0,
        vocab: int = 151936,
        use_peers: bool = True,
        name: str = "group",
    ) -> CudaGroup:
        if not hasattr(self, "store"):
            self.store = TCPStore(
                "127.0.0.1",
                self.port,
                is_master=self.rank == 0,
                timeout=timedelta(seconds=60),
                wait_for_workers=False,
            )
        store = torch.distributed.PrefixStore(name, self.store)
        group = CudaGroup(
            self.rank, self.world_size, store, self.device, self.stream, timeout_s=timeout_s
        )
        group.reserve(MAX_TOKENS, HIDDEN, ROWS, widths(self.world_size, vocab), use_peers)
        assert group.capturable == use_peers
        return group

    def parts(self, dtype: torch.dtype, seed: int, *shape: int) -> list[torch.Tensor]:
        """Every rank's part, on the CPU: signed zeros, tiny, large and infinite ones among them."""
        parts = []
        for rank in range(self.world_size):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            part = torch.randn(shape, generator=generator)
            part *= torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
            flat = part.view(-1)
            flat[::7] = -0.0
            flat[1::101] = 1e-40
            flat[2::103] = 6e4
            flat[3::211] = float("inf")
            parts.append(part.to(dtype))
        return parts

    def sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(parts[0].dtype)


def check_sum(case: RankCase, group: CudaGroup, parts: list[torch.Tensor], offset: int = 0) -> None:
    """The sum of `parts` has the right bits, `offset` elements after an aligned place."""
    own = parts[case.rank]
    space = torch.full((own.numel() + 2 * offset + 8,), 7.0, dtype=own.dtype, device=case.device)
    x = space[offset : offset + own.numel()].view(own.shape)
    x.copy_(own)
    group.all_reduce(x)
    assert same_bits(x, case.sum(parts)), (own.dtype, own.shape, offset)
    beside = torch.cat((space[:offset], space[offset + own.numel() :]))
    assert (beside == 7).all()


def sums(case: RankCase) -> None:
    """Any type, size and place, in packets and in chunks: rank order, one rounding."""
    group = case.group()
    seed = 0
    shapes = [(1, 4096), (8, 4096), (16, 5120), (3, 72), (5, 36), (2, 5), (1, 1), (7, 1023)]
    shapes += [(40, 5120), (512, 4096), (1000, 4096), (3, 100_003)]
    for dtype in TYPES:
        for shape in shapes:
            seed += 1
            check_sum(case, group, case.parts(dtype, seed, *shape), offset=seed % 2)
    rows = case.parts(torch.bfloat16, 99, 300, HIDDEN)
    check_sum(case, group, rows)
    for first in (0, 17, 299):
        check_sum(case, group, [part[first : first + 1].contiguous() for part in rows])
    assert group.total(case.rank + 0.5) == sum(rank + 0.5 for rank in range(case.world_size))
    group.check()
    group.close()


def fused(case: RankCase) -> None:
    """The same bits as a sum and then add_rms_norm; and near the truth."""
    group = case.group()
    seed = 0
    for dtype in TYPES:
        for rows, hidden in ((1, 4096), (8, 4096), (16, 5120), (3, 1024), (4, 72), (2, 36), (3, 7)):
            seed += 1
            parts = case.parts(dtype, seed, rows, hidden)
            parts = [part.nan_to_num(posinf=3.0).clamp(-50, 50) for part in parts]
            delta = parts[case.rank].to(case.device)
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(rows, hidden, generator=generator).to(case.device)
            weight = torch.rand(hidden, generator=generator).to(case.device)
            assert group.fuses_norm(delta)
            plain, expected = start.clone(), torch.full_like(delta, float("nan"))
            case.ops.add_rms_norm(plain, case.sum(parts).to(case.device), weight, 1e-6, expected)
            residual, out = start.clone(), torch.full_like(delta, float("nan"))
            group.all_reduce_add_rms_norm(residual, delta, weight, 1e-6, out)
            assert same_bits(delta, parts[case.rank])
            assert same_bits(residual, plain)
            assert same_bits(out, expected), (dtype, rows, hidden)
            exact = start.double() + case.sum(parts).double().to(case.device)
            exact = exact * (exact.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight
            assert (out.double() - exact).norm() < 4e-3 * exact.norm()
    assert not group.fuses_norm(torch.empty(ROWS + 1, HIDDEN))
    assert not group.fuses_norm(torch.empty(1, HIDDEN + 1))
    group.close()


def gathers(case: RankCase) -> None:
    """Columns of uneven parts, read and written with strides; nothing beside them is touched."""
    for vocab in (151936, 151937, 1000, 4097 * case.world_size + 1, case.world_size):
        group = case.group(vocab=vocab, name=str(vocab))
        parts = widths(case.world_size, vocab)
        for rows, padding in ((1, 0), (8, 0), (16, 4), (5, 3)):
            generator = torch.Generator().manual_seed(rows)
            whole = torch.randn(rows, vocab, generator=generator)
            part = parts[case.rank]
            local = torch.empty(rows, part.size + padding, device=case.device)[:, : part.size]
            local.copy_(whole[:, part.begin : part.end])
            space = torch.full((rows, vocab + padding), float("nan"), device=case.device)
            group.gather_columns(local, space[:, :vocab])
            assert same_bits(space[:, :vocab].contiguous(), whole), (vocab, rows)
            assert space[:, vocab:].isnan().all()
        group.close()


def replays(case: RankCase) -> None:
    """A graph of every kind of call, replayed with new numbers; ranks come late by turns."""
    group = case.group(vocab=20_001)
    device, rank = case.device, case.rank
    generator = torch.Generator().manual_seed(5)
    step = torch.zeros((), dtype=torch.int64, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    weight = torch.rand(4096, generator=generator).to(device)
    base = torch.randn(case.world_size, 64, 4096, generator=generator).to(device).bfloat16()
    columns = torch.randn(8, 20_001, generator=generator).to(device)
    own = widths(case.world_size, 20_001)[rank]

    def count(result: torch.Tensor, expected: torch.Tensor) -> None:
        kind = INTS[result.dtype]
        wrong.add_((result.view(kind) != expected.view(kind)).sum())

    def numbers(salt: int) -> torch.Tensor:
        factors = (
            step * 7919 + salt + torch.arange(case.world_size, device=device) * 104_729
        ) % 8191
        return (base * (factors.float() / 512)[:, None, None]).bfloat16()

    def total(parts: torch.Tensor) -> torch.Tensor:
        result = parts[0].float()
        for part in parts[1:]:
            result = result + part.float()
        return result.bfloat16()

    def late(which: int) -> None:
        if rank == which and not SHARED:
            torch.cuda._sleep(20_000)

    def body() -> None:
        step.add_(1)
        parts = numbers(0)[:, :8]
        x = parts[rank].clone()
        late(0)
        group.all_reduce(x)
        count(x, total(parts))
        parts = numbers(1)[:, :8]
        residual, expected = torch.ones(2, 8, 4096, device=device).unbind()
        out, out_expected = torch.empty_like(parts[0]), torch.empty_like(parts[0])
        case.ops.add_rms_norm(expected, total(parts), weight, 1e-6, out_expected)
        late(1)
        for _ in range(2):
            residual.fill_(1)
            group.all_reduce_add_rms_norm(residual, parts[rank].contiguous(), weight, 1e-6, out)
            count(residual, expected)
            count(out, out_expected)
        logits = columns * (step % 8191)
        late(0)
        gathered = torch.zeros_like(logits)
        group.gather_columns(logits[:, own.begin : own.end], gathered)
        count(gathered, logits)
        parts = numbers(2)
        x = parts[rank].clone()
        late(1)
        group.all_reduce(x)
        count(x, total(parts))

    body()
    case.stream.synchronize()
    assert wrong.item() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=case.stream):
        body()
    rng = random.Random(rank)
    for _ in range(20 if SHARED else 10_000):
        if rng.random() < 0.05:
            torch.cuda._sleep(int(2 ** rng.uniform(10, 20)))
        graph.replay()
    case.stream.synchronize()
    group.check()
    assert step.item() > 20
    assert wrong.item() == 0
    group.close()


def absent(case: RankCase) -> None:
    """A peer that does not come: the calls end in about the time-out, and check says so."""
    group = case.group(timeout_s=2.0)
    if case.rank == 1:
        # Lives on, so that its memory does.
        time.sleep(8)
        os._exit(0)
    x = torch.ones(8, 4096, device=case.device)
    big = torch.ones(1000, 4096, device=case.device)
    group.check()
    started = time.monotonic()
    for _ in range(50):
        group.all_reduce(x)
        group.all_reduce(big)
    case.stream.synchronize()
    assert 1.5 < time.monotonic() - started < 4
    with pytest.raises(StepError, match="lost its group"):
        group.check()
    group.close()
    assert time.monotonic() - started < 12


def killed(case: RankCase) -> None:
    """A peer whose process ends in the middle."""
    group = case.group(timeout_s=2.0)
    x = torch.ones(8, 4096, device=case.device)
    for _ in range(10):
        group.all_reduce(x)
    case.stream.synchronize()
    if case.rank == 1:
        os._exit(0)
    time.sleep(1.0)
    started = time.monotonic()
    for _ in range(50):
        group.all_reduce(x)
    case.stream.synchronize()
    assert time.monotonic() - started < 4
    with pytest.raises(StepError, match="lost its group"):
        group.check()
    group.close()


def aborted(case: RankCase) -> None:
    """A rank that is told to stops waiting for one that is stopped, also in a graph, and can form
    another group with the next one; the memory comes back."""
    x = torch.ones(8, 4096, device=case.device)
    big = torch.ones(1000, 4096, device=case.device)
    # The first one loads kernels, which stay.
    first = case.group(name="first")
    first.all_reduce(x)
    first.all_reduce(big)
    first.close()
    before = torch.cuda.mem_get_info(case.device)[0]
    group = case.group(name="second", timeout_s=1000.0)
    group.all_reduce(x)
    case.stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=case.stream):
        group.all_reduce(x)
    if case.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(200):
        graph.replay()
        group.all_reduce(big)
    ended = case.stream.record_event()
    time.sleep(0.5)
    assert not ended.query(), "it does not wait"
    started = time.monotonic()
    group.abort()
    case.stream.synchronize()
    drained_s = time.monotonic() - started
    with pytest.raises(PeerLostError, match="lost its group"):
        group.check()
    group.close()
    closed_s = time.monotonic() - started
    print(f"abort: kernels ended after {drained_s:.3f} s, the group after {closed_s:.3f} s")
    assert closed_s < 2
    del graph
    torch.cuda.empty_cache()
    if not SHARED:
        left = torch.cuda.mem_get_info(case.device)[0] - before
        assert left > -(8 << 20), f"{left >> 20} MiB did not come back"
    check_alone(case)


def nccl_aborted(case: RankCase) -> None:
    """The same by NCCL."""
    group = case.group(use_peers=False, timeout_s=1000.0)
    x = torch.ones(8, 4096, device=case.device)
    group.all_reduce(x)
    case.stream.synchronize()
    if case.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(x)
    ended = case.stream.record_event()
    time.sleep(0.5)
    assert not ended.query(), "it does not wait"
    started = time.monotonic()
    group.abort()
    case.stream.synchronize()
    group.close()
    print(f"abort: {time.monotonic() - started:.3f} s")
    assert time.monotonic() - started < 5
    check_alone(case)


def check_alone(case: RankCase) -> None:
    """The device goes on."""
    x = torch.ones(512, 512, device=case.device)
    assert float((x @ x).sum()) == 512.0**3


def again(case: RankCase) -> None:
    """Groups one after the other in the same processes; the memory comes back."""
    free = []
    for index in range(4):
        group = case.group(name=str(index))
        check_sum(case, group, case.parts(torch.bfloat16, index, 8, 4096))
        group.close()
        free.append(torch.cuda.mem_get_info(case.device)[0])
    if not SHARED:
        assert free[-1] >= free[1] - (1 << 21)


def nccl(case: RankCase) -> None:
    """The way without access between GPUs gives the same bits; so does NCCL's own sum of two."""
    group = case.group(use_peers=False, vocab=20_001)
    for seed, dtype in enumerate(TYPES):
        for shape in ((1, 4096), (8, 4096), (1, 7), (1000, 5120)):
            check_sum(case, group, case.parts(dtype, seed, *shape))
    assert not group.fuses_norm(torch.empty(1, HIDDEN))
    whole = torch.randn(5, 20_001, generator=torch.Generator().manual_seed(1))
    part = widths(case.world_size, 20_001)[case.rank]
    out = torch.full((5, 20_001), float("nan"), device=case.device)
    group.gather_columns(whole[:, part.begin : part.end].to(case.device), out)
    assert same_bits(out, whole)
    if case.world_size == 2:
        parts = case.parts(torch.bfloat16, 9, 8, 4096)
        x = parts[case.rank].to(case.device)
        group._fallback()._backend.allreduce([x]).wait()
        assert same_bits(x, case.sum(parts))
    case.stream.synchronize()
    group.check()
    group.close()


def nccl_absent(case: RankCase) -> None:
    """The same end as with peers, by NCCL's watchdog."""
    group = case.group(use_peers=False, timeout_s=8.0)
    x = torch.ones(8, 4096, device=case.device)
    group.all_reduce(x)
    case.stream.synchronize()
    if case.rank == 1:
        # It lives for as long as the other waits: until `run_ranks` has seen that one's end.
        sys.stdin.read()
        os._exit(0)
    group.all_reduce(x)
    case.stream.synchronize()
    time.sleep(2)
    with pytest.raises(StepError, match="lost its group"):
        group.check()
    group.close()


CASES: dict[str, Callable[[RankCase], None]] = {
    case.__name__: case
    for case in (
        *(sums, fused, gathers, replays, absent, killed, aborted, again),
        *(nccl, nccl_absent, nccl_aborted),
    )
}
# Cases in which a rank kills itself.
DEADLY = ("aborted", "nccl_aborted")


def run_ranks(case: str, world_size: int) -> None:
    if not SHARED and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    if SHARED and (torch.cuda.device_count() == 0 or case.startswith("nccl")):
        pytest.skip("ranks cannot share a GPU here")
    port = random.randrange(20_000, 60_000)
    command = [sys.executable, __file__, case]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        expected = -signal.SIGKILL if case in DEADLY and rank == 1 else 0
        assert process.returncode == expected, f"rank {rank} of {case}:\n{output[-4000:]}"
        print(output)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str, world_size: int) -> None:
    if world_size > 2 and case in ("absent", "killed", "nccl_absent", *DEADLY):
        pytest.skip("with two ranks")
    run_ranks(case, world_size)


@pytest.mark.skipif(not _native.BUILT_WITH_CUDA, reason="a build without CUDA")
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_one_rank_is_a_group() -> None:
    group = CudaGroup(0, 1, None, torch.device("cuda", 0), torch.cuda.current_stream(), 1.0)
    group.reserve(64, 64, 4, [Part(0, 100)])
    x = torch.full((4, 64), 3.0, device="cuda")
    group.all_reduce(x)
    assert (x == 3).all()
    assert group.total(2.5) == 2.5
    assert not group.fuses_norm(x)
    group.check()
    group.close()


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    CASES[name](RankCase(*map(int, numbers)))
