"""One rank's life: set it up for an epoch, run its commands, release it, keep its weights."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worker import _native
from worker.backend import Backend
from worker.checkpoint import Checkpoint, open_checkpoint
from worker.config import GROUP_TIMEOUT_S
from worker.decoder import Decoder
from worker.device import Device, Pace, open_device
from worker.errors import MemoryPlanError, ProtocolError, SetupCancelledError, SetupError
from worker.executor import Executor
from worker.logs import Place
from worker.memory_plan import (
    DTYPE_BYTES,
    MemoryPlan,
    ServingLimits,
    beside,
    check_fits,
    without_weights,
)
from worker.runner import Runner
from worker.self_test import PrefixReuse, SelfTestResult, prefix_reuse, run_self_tests
from worker.sharding import Shard, shard_of
from worker.tensor_parallel import Group, Rendezvous
from worker.weights import ModelWeights, load_weights

_LOG = logging.getLogger(__name__)
DEFAULT_MAX_SEQ_LEN = 4096
# More than a device keeps.
_MOST_GAPS = 1 << 20
_REST_NS = 1_000_000_000


# Called with (stage, bytes done, bytes in all; 0 if not known).
StageProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What Configure asks for. max_seq_len 0 and dtype "auto" are resolved from the checkpoint,
    max_step_tokens 0 is the device's, max_running 0 is num_slots."""

    epoch: int
    rank: int = 0
    world_size: int = 1
    rendezvous_address: str = ""
    num_slots: int = 8
    max_seq_len: int = 0
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    max_step_tokens: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a configured rank is."""

    epoch: int
    rank: int
    limits: ServingLimits
    num_layers: int
    vocab_size: int
    fingerprint: str
    device: str
    # As device_name and build of Configured.
    device_name: str
    build: str
    pace: Pace
    plan: MemoryPlan
    measured_bytes: int
    self_tests: tuple[SelfTestResult, ...]
    prefix_reuse: PrefixReuse
    num_threads: int
    max_logprobs_steps: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Weights that may serve the next epoch too, and what they are weights of."""

    key: tuple[str, int, int, str]
    backend: Backend[Any]
    weights: ModelWeights


class Rank:
    """Owns everything of a rank. Used from one thread; results may be collected on a second.

    `device_name` as open_device takes it.
    """

    def __init__(self, model_dir: Path, num_threads: int, device_name: str = "cpu") -> None:
        self._model_dir = model_dir
        self._num_threads = num_threads
        self._device_name = device_name
        self._device: Device | None = None
        self._loaded: _Loaded | None = None
        self._executor: Executor | None = None
        self._group: Group | None = None
        # As of the last Configure, for log lines.
        self.place: Place = None

    def configure(
        self, setup: RankSetup, progress: StageProgress, cancelled: Callable[[], bool]
    ) -> RankInfo:
        """Loads, joins the group, tests itself. Raises SetupError or SetupCancelledError."""
        self.place = setup.rank, setup.epoch
        try:
            return self._configure(setup, progress, cancelled)
        except torch.OutOfMemoryError as error:
            raise MemoryPlanError(
                f"the device's memory ran out although the plan fitted: {error}; another process "
                "may have taken it; take fewer slots (--num-slots) or shorter ones (--max-seq-len)"
            ) from error

    def _configure(
        self, setup: RankSetup, progress: StageProgress, cancelled: Callable[[], bool]
    ) -> RankInfo:
        self.release()
        progress("checking the checkpoint", 0, 0)
        checkpoint = open_checkpoint(self._model_dir)
        if checkpoint.unlisted_files:
            _LOG.warning("not read, not listed: %s", ", ".join(checkpoint.unlisted_files))
        shard = shard_of(checkpoint.config, setup.rank, setup.world_size)
        device = self._open_device(setup.rank)
        limits = resolve_limits(checkpoint, setup, device)
        device.check_model(checkpoint.config, limits)
        key = (checkpoint.fingerprint, setup.rank, setup.world_size, limits.weight_dtype)
        if self._loaded is not None and self._loaded.key != key:
            self._loaded = None
            device.release_free_memory()
        check_fits(self._plan(checkpoint, shard, limits, device))
        progress("joining the group", 0, 0)
        self._group = device.join_group(
            Rendezvous(
                setup.rank,
                setup.world_size,
                setup.rendezvous_address,
                GROUP_TIMEOUT_S,
                cancelled,
                device.name,
            )
        )
        plan = self._plan(checkpoint, shard, limits, device)
        if device.shares_memory:
            plan = self._share(plan, self._group)
        check_fits(plan)
        # `abort` came too early for the group, or finds it.
        _go_on(cancelled)
        loaded = self._load(checkpoint, shard, limits, device, key, progress, cancelled)
        progress("allocating slots", 0, plan.kv_bytes)
        decoder = Decoder(
            checkpoint.config, shard, limits, loaded.weights, loaded.backend, self._group
        )
        runner, batches = device.runner(decoder)
        progress("self-test", 0, 0)
        tests = tuple(run_self_tests(decoder, batches))
        # An aborted group's sums are garbage.
        _go_on(cancelled)
        self._executor = Executor(runner, limits, checkpoint.config.vocab_size, setup.epoch)
        device.release_free_memory()
        progress("warming up", 0, 0)
        device.warm_up(decoder, batches)
        return RankInfo(
            epoch=setup.epoch,
            rank=setup.rank,
            limits=limits,
            num_layers=checkpoint.config.num_layers,
            vocab_size=checkpoint.config.vocab_size,
            fingerprint=checkpoint.fingerprint,
            device=device.name,
            device_name=device.model_name,
            build=f"{_native.BUILD} torch {torch.__version__}",
            pace=device.pace,
            plan=plan,
            measured_bytes=device.resident_bytes() + self._group.device_bytes,
            self_tests=tests,
            prefix_reuse=prefix_reuse(tests),
            num_threads=device.num_threads,
            max_logprobs_steps=runner.max_logprobs_steps,
        )

    def _open_device(self, rank: int) -> Device:
        if self._device is None:
            self._device = open_device(self._device_name, rank, self._num_threads)
        self._device.enter()
        return self._device

    @property
    def executor(self) -> Executor:
        """The executor of the present epoch."""
        if self._executor is None:
            raise ProtocolError("the rank is not configured")
        return self._executor

    @property
    def waits_for_peers(self) -> bool:
        """Whether a step may be held up by another rank, perhaps for ever."""
        return self._group is not None and self._group.world_size > 1

    def abort(self) -> None:
        """Ends every wait for a peer, in steps and in `configure`, whose `cancelled` says so by
        now. From any thread; `release` is to follow."""
        group = self._group
        if group is not None:
            group.abort()

    def release(self) -> None:
        """Leaves the group and drops the slots; weights stay."""
        if self._group is not None:
            self._group.close()
        self._group = None
        if self._executor is not None:
            _log_idle(self._executor.runner)
        self._executor = None
        if self._device is not None:
            # Slots must not wait for the collector's own time: the next ones need their memory.
            gc.collect()
            self._device.release_free_memory()

    def _plan(
        self, checkpoint: Checkpoint, shard: Shard, limits: ServingLimits, device: Device
    ) -> MemoryPlan:
        plan = device.plan(checkpoint.config, shard, limits)
        return plan if self._loaded is None else without_weights(plan)

    def _share(self, plan: MemoryPlan, group: Group) -> MemoryPlan:
        """The plan beside the other ranks of this machine; none of them has begun to allocate."""
        own = plan.needed_bytes - (plan.weight_bytes if self._loaded is not None else 0)
        others_mib = group.total(own / (1 << 20)) - own / (1 << 20)
        return beside(plan, int(others_mib * (1 << 20))) if group.same_machine else plan

    def _load(
        self,
        checkpoint: Checkpoint,
        shard: Shard,
        limits: ServingLimits,
        device: Device,
        key: tuple[str, int, int, str],
        progress: StageProgress,
        cancelled: Callable[[], bool],
    ) -> _Loaded:
        if self._loaded is None:

            def on_bytes(done: int, total: int) -> None:
                _go_on(cancelled)
                progress("loading weights", done, total)

            started = time.monotonic()
            backend = device.backend(limits.weight_dtype)
            weights = load_weights(checkpoint, shard, limits.weight_dtype, backend, on_bytes)
            self._loaded = _Loaded(key, backend, weights)
            device.release_free_memory()
            _LOG.info("weights read in %.1f s", time.monotonic() - started)
        else:
            _LOG.info("weights kept")
        return self._loaded


def _go_on(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise SetupCancelledError("the stream ended during the set-up")


def _log_idle(runner: Runner) -> None:
    """How long a GPU had nothing to do between two steps, whoever had to send the next one."""
    # Not steps that say nothing of their begin, nor the times in which nobody asked for any.
    gaps = sorted(gap for gap in runner.gaps_ns(_MOST_GAPS) if 0 < gap < _REST_NS)
    if gaps:
        parts = (gaps[len(gaps) * percent // 100] / 1e3 for percent in (50, 90, 99))
        text = "idle between steps: median %.1f us, 90 %% %.1f us, 99 %% %.1f us, of %d"
        _LOG.info(text, *parts, len(gaps))


def resolve_limits(
    checkpoint: Checkpoint, setup: RankSetup, device: Device | type[Device]
) -> ServingLimits:
    """The settings in full. Raises SetupError naming the setting, its value and the limit."""
    if setup.num_slots < 1:
        raise SetupError(f"num_slots must be at least 1, not {setup.num_slots}")
    max_running = setup.max_running or setup.num_slots
    if max_running > setup.num_slots:
        raise SetupError(
            f"max_running {max_running} is more than num_slots {setup.num_slots}: "
            "what runs sits in a slot"
        )
    max_step_tokens = setup.max_step_tokens or max(device.pace.max_step_tokens, max_running)
    if max_step_tokens < max_running:
        raise SetupError(
            f"max_step_tokens {max_step_tokens} is less than max_running {max_running}: "
            "a step holds at least one row for each slot that runs"
        )
    longest = checkpoint.config.max_positions
    if setup.max_seq_len > longest:
        raise SetupError(
            f"max_seq_len {setup.max_seq_len} is more than the model's {longest} positions"
        )
    weight_dtype = setup.weight_dtype
    if weight_dtype == "auto":
        stored = checkpoint.weight_dtype
        weight_dtype = stored if stored in device.weight_dtypes else "float32"
    kv_dtype = weight_dtype if setup.kv_dtype == "auto" else setup.kv_dtype
    for name, dtype in (("weight_dtype", weight_dtype), ("kv_dtype", kv_dtype)):
        if dtype not in DTYPE_BYTES:
            raise SetupError(
                f"{name} {dtype!r} is not supported; supported: auto, {', '.join(DTYPE_BYTES)}"
            )
    return ServingLimits(
        num_slots=setup.num_slots,
        max_seq_len=setup.max_seq_len or min(longest, DEFAULT_MAX_SEQ_LEN),
        max_step_tokens=max_step_tokens,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        max_running=max_running,
    )
