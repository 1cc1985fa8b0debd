"""The NVIDIA GPUs of this machine, as the driver's management library (NVML) describes them."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any


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
    """Two cards: whether one reads the other's memory, and whether NVLink joins them."""

    first: int
    second: int
    peer_access: bool
    nvlink: bool


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the driver says. `cuda`: the newest CUDA that it runs."""

    driver: str
    cuda: tuple[int, int]
    cards: tuple[Gpu, ...]
    links: tuple[Link, ...]


class NoDriverError(Exception):
    """There is no NVIDIA driver here, or it cannot be asked; the message says which."""


def find_gpus(nvml: Any = None) -> Gpus:
    """Looks at the cards without using one. `nvml`: the module, pynvml unless given.

    NoDriverError where there is none to ask.
    """
    library = nvml if nvml is not None else _import_nvml()
    with _session(library):
        handles = [
            library.nvmlDeviceGetHandleByIndex(index)
            for index in range(library.nvmlDeviceGetCount())
        ]
        version = library.nvmlSystemGetCudaDriverVersion_v2()
        return Gpus(
            driver=library.nvmlSystemGetDriverVersion(),
            cuda=(version // 1000, version % 1000 // 10),
            cards=tuple(_card(library, handle) for handle in handles),
            links=tuple(
                _link(library, handles, first, second)
                for first, second in combinations(range(len(handles)), 2)
            ),
        )


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
