"""The NVIDIA GPUs of this machine, as the driver's management library (NVML) describes them.

NVML counts them as they are plugged in; CUDA, and so a worker, by speed or as it is told, and
without those that CUDA_VISIBLE_DEVICES hides. The UUID says which is which.
"""

import ctypes
import importlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

# Of cuInit; also where CUDA_VISIBLE_DEVICES hides all.
_CUDA_NO_DEVICE: Final = 100


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. `num_programs`: those that use it now, as far as can be seen from here."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    num_programs: int


@dataclass(frozen=True, slots=True)
class Link:
    """Two of `Gpus.cards`: whether one reads the other's memory, and whether NVLink joins them."""

    first: int
    second: int
    peer_access: bool
    nvlink: bool


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the driver says. `cuda`: the newest CUDA that it runs.

    `cards` are those that CUDA sees, in its order: a worker on `cuda:N` has the N-th.
    """

    driver: str
    cuda: tuple[int, int]
    cards: tuple[Gpu, ...]
    links: tuple[Link, ...]
    hidden: tuple[Gpu, ...] = ()


class NoDriverError(Exception):
    """There is no NVIDIA driver here, or it cannot be asked; the message says which."""


def find_gpus(nvml: Any = None, cuda: Any = None) -> Gpus:
    """Looks at the cards without using one.

    `nvml`, `cuda`: pynvml and libcuda unless given. NoDriverError where there is none to ask.
    """
    library = nvml if nvml is not None else _import_nvml()
    with _session(library):
        found = {}
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            found[library.nvmlDeviceGetUUID(handle)] = handle
        order = _cuda_order(cuda if cuda is not None else _load_cuda())
        # Parts of a card (MIG) have UUIDs of their own: then all cards are shown.
        if order is None or not found.keys() >= set(order):
            order = list(found)
        handles = [found[name] for name in order]
        version = library.nvmlSystemGetCudaDriverVersion_v2()
        return Gpus(
            driver=library.nvmlSystemGetDriverVersion(),
            cuda=(version // 1000, version % 1000 // 10),
            cards=tuple(_card(library, handle) for handle in handles),
            links=tuple(
                _link(library, handles, first, second)
                for first, second in combinations(range(len(handles)), 2)
            ),
            hidden=tuple(
                _card(library, handle) for name, handle in found.items() if name not in order
            ),
        )


def _load_cuda() -> Any:
    """libcuda, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _cuda_order(library: Any) -> list[str] | None:
    """The UUIDs of the cards that CUDA sees, in its order, as NVML writes them; None: no answer."""
    # Drivers before CUDA 11.4 do not tell; that they are too old is said elsewhere.
    if library is None or not hasattr(library, "cuDeviceGetUuid_v2"):
        return None
    status = library.cuInit(0)
    if status == _CUDA_NO_DEVICE:
        return []
    count = ctypes.c_int()
    if status or library.cuDeviceGetCount(ctypes.byref(count)):
        return None
    names = []
    for index in range(count.value):
        device, number = ctypes.c_int(), ctypes.create_string_buffer(16)
        if library.cuDeviceGet(ctypes.byref(device), index):
            return None
        if library.cuDeviceGetUuid_v2(number, device):
            return None
        names.append(f"GPU-{uuid.UUID(bytes=number.raw)}")
    return names


def _import_nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise NoDriverError("nvidia-ml-py, which asks the driver, is missing") from None


@contextmanager
def _session(library: Any) -> Iterator[None]:
    try:
        library.nvmlInit()
    except (library.NVMLError_LibraryNotFound, library.NVMLError_DriverNotLoaded):
        raise NoDriverError("no NVIDIA driver") from None
    except library.NVMLError as error:
        raise NoDriverError(f"the NVIDIA driver does not answer: {error}") from error
    try:
        yield
    except library.NVMLError as error:
        raise NoDriverError(f"the NVIDIA driver does not answer: {error}") from error
    finally:
        library.nvmlShutdown()


def _card(library: Any, handle: Any) -> Gpu:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    try:
        programs = len(library.nvmlDeviceGetComputeRunningProcesses(handle))
    except library.NVMLError:  # not told inside some containers
        programs = 0
    major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
    name = library.nvmlDeviceGetName(handle)
    return Gpu(name, (major, minor), memory.total, memory.free, programs)


def _link(library: Any, handles: list[Any], first: int, second: int) -> Link:
    def has(index: int) -> bool:
        try:
            status = library.nvmlDeviceGetP2PStatus(handles[first], handles[second], index)
        except library.NVMLError:  # not told inside some containers
            return False
        return bool(status == library.NVML_P2P_STATUS_OK)

    read = has(library.NVML_P2P_CAPS_INDEX_READ)
    return Link(first, second, read, has(library.NVML_P2P_CAPS_INDEX_NVLINK))
