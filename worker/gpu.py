"""Whether a GPU can be used, and if not, why and what to do."""

from __future__ import annotations

import os

import pynvml
import torch

from worker import _native
from worker.errors import SetupError

MIN_CAPABILITY = (8, 0)


def is_built() -> bool:
    """Whether the native library has kernels for GPUs."""
    return bool(_native.BUILT_WITH_CUDA)


def usable(index: int) -> bool:
    """Whether GPU `index` can be used."""
    try:
        refuse_unusable(index)
    except SetupError:
        return False
    return True


def refuse_unusable(index: int) -> None:
    """Raises SetupError unless GPU `index` can be used, saying what was found and what to do."""
    if not is_built():
        raise SetupError(
            "--device cuda: this installation was built without CUDA; with nvcc on the PATH: "
            "make build-gpu, or SLOTWISE_CUDA=ON pip install ."
        )
    if torch.version.cuda is None:
        raise SetupError(
            f"--device cuda: torch {torch.__version__} is a build for CPUs; take the one for CUDA "
            "from pip's own index: pip install --force-reinstall torch"
        )
    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        raise SetupError(
            f"--device cuda: no NVIDIA driver answers ({error}); install one, or in a container "
            "pass the GPU through, or serve with --device cpu"
        ) from error
    count = -1
    try:
        count = torch.cuda.device_count()
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if count == 0:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            setting = "not set" if visible is None else repr(visible)
            raise SetupError(
                f"--device cuda: CUDA sees no GPU: {error}; CUDA_VISIBLE_DEVICES is {setting}; "
                f"driver {driver}; `slotwise doctor` lists the cards"
            ) from error
        raise SetupError(
            f"--device cuda: driver {driver} cannot run CUDA {torch.version.cuda}: {error}; take a "
            "newer driver, or torch for an older CUDA"
        ) from error
    if index >= count:
        raise SetupError(
            f"--device cuda:{index}: {count} GPU(s) are visible; a group needs one for each rank "
            "(see --tp and CUDA_VISIBLE_DEVICES), or --device cpu"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        raise SetupError(
            f"--device cuda:{index}: {torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}; at least {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} "
            "(Ampere) is needed; serve with --device cpu"
        )
