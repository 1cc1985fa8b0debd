"""One NVIDIA GPU as the device of a rank. Imported only where the native library has CUDA."""

from __future__ import annotations

from typing import Any

import torch

from worker.backend import Backend
from worker.batch import PrefillChunk
from worker.cuda_backend import BLOCK_ROWS, STREAM_ROWS, CudaBackend
from worker.cuda_runner import CudaRunner
from worker.cuda_slots import CudaSlots
from worker.decoder import Decoder
from worker.device import Device, Pace
from worker.errors import SetupError
from worker.memory_plan import Footprint, ServingLimits
from worker.model_config import ModelConfig
from worker.peers import CudaGroup
from worker.runner import Runner
from worker.self_test import Batches
from worker.tensor_parallel import Group, Rendezvous, meet

HEAD_DIMS = (64, 96, 128, 256)
# Left free beside what is planned, for the driver and for libraries that allocate on first use.
_MARGIN_BYTES = 256 << 20


def warm_up_rows(most: int) -> list[int]:
    """Rows of a chunk that reach every kind of kernel, `most` at last."""
    doubled = [BLOCK_ROWS << power for power in range(most.bit_length())]
    return [rows for rows in (STREAM_ROWS, *doubled) if rows < most] + [most]


class CudaDevice(Device):
    """A GPU of this machine. `index` counts as CUDA does, CUDA_VISIBLE_DEVICES applied."""

    weight_dtypes = ("bfloat16", "float16", "float32")
    shares_memory = False
    num_threads = 0
    # A chunk of 2,048 rows keeps the matrix units busy, and the forward beside decoding streams has
    # that size too: the prompts' tokens, and up to 32 slots. On an H200, eight prompts of 8K: 1,098
    # tokens/s; half of it gives 1,015, with gaps of 33 ms between tokens instead of 52 to 63 (p99).
    pace = Pace(2048, 16 * BLOCK_ROWS - 32, 5_000_000)
    footprint = Footprint(
        row_grid=BLOCK_ROWS,
        row_table=True,
        float32_activations=False,
        attention_tile=128,
        # cuBLAS's workspace, the sampler's, the graph, what loading and the self-test leave.
        reserve_bytes=384 << 20,
        group_bytes=1 << 30,
    )

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        # Of a card that nobody else uses: what the driver's context takes.
        self._context_bytes = min(total - free, 1 << 30)
        self._card = properties.name

    @property
    def name(self) -> str:
        """As torch names it, with the card's name."""
        return f"{self._device} ({self._card})"

    @property
    def model_name(self) -> str:
        """The card's name."""
        return self._card

    def resident_bytes(self) -> int:
        """Device memory of this process."""
        return self._context_bytes + torch.cuda.memory_reserved(self._device)

    def available_bytes(self) -> int:
        """Device memory that can still be taken, whoever holds the rest."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(0, free - _MARGIN_BYTES)

    def total_bytes(self) -> int:
        """The card's memory."""
        return torch.cuda.mem_get_info(self._device)[1]

    def backend(self, weight_dtype: str) -> Backend[Any]:
        """The operators on the device's stream."""
        return CudaBackend(self._device, self._stream, weight_dtype)

    def runner(self, decoder: Decoder) -> tuple[Runner, Batches]:
        """See Device."""
        backend = decoder.ops
        assert isinstance(backend, CudaBackend)
        slots = CudaSlots(backend, decoder.limits.max_running, decoder.config.vocab_size)
        return CudaRunner(decoder, backend, slots), slots

    def warm_up(self, decoder: Decoder, batches: Batches) -> None:
        """Libraries choose and load their kernels, and take memory, when they are first asked."""
        limits = decoder.limits
        most = min(limits.max_step_tokens, limits.max_seq_len)
        for rows in warm_up_rows(most):
            # Behind as long a prefix as there can be: few rows have a kernel of their own there.
            chunk = PrefillChunk(0, 1, most - rows, (0,) * rows, sample=True, setup=None)
            decoder.forward(batches.chunk_batch((chunk,)))
        decoder.cache.clear(0)
        self._stream.synchronize()

    def join_group(self, rendezvous: Rendezvous) -> Group:
        """By the GPUs writing to each other's memory, or by NCCL where they cannot."""
        rank, world_size, timeout_s = rendezvous.rank, rendezvous.world_size, rendezvous.timeout_s
        store = meet(rendezvous)[0] if world_size > 1 else None
        return CudaGroup(
            rank, world_size, store, self._device, self._stream, timeout_s, rendezvous.cancelled
        )

    def enter(self) -> None:
        """Makes the GPU and the stream the calling thread's."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def release_free_memory(self) -> None:
        """Gives memory that nobody uses back, of the machine and of the GPU.

        Raises RuntimeError if the GPU has failed.
        """
        super().release_free_memory()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def check_model(self, config: ModelConfig, limits: ServingLimits) -> None:
        """See Device."""
        super().check_model(config, limits)
        if limits.kv_dtype != limits.weight_dtype:
            raise SetupError(
                f"kv_dtype {limits.kv_dtype!r} with weight_dtype {limits.weight_dtype!r}: on a GPU "
                "both must be equal; leave kv_dtype at auto"
            )
        if config.head_dim not in HEAD_DIMS:
            raise SetupError(
                f"head_dim {config.head_dim} is not supported on a GPU; supported: "
                f"{', '.join(map(str, HEAD_DIMS))}; --device cpu takes it"
            )
