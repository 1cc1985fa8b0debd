"""What `slotwise doctor` says of NVIDIA GPUs."""

import os
import re
from importlib import metadata

from .finding import Finding, gib
from .gpus import Gpu, Gpus, Link, NoDriverError, find_gpus

# What the CUDA operators are compiled for.
LEAST_CAPABILITY = (8, 0)


def gpu_findings(with_cuda: bool) -> tuple[list[Finding], bool]:
    """The driver, the cards and what joins them; whether a model would be served on one.

    `with_cuda`: whether the native library was built with CUDA.
    """
    try:
        gpus = find_gpus()
    except NoDriverError as error:
        advice = "models are served on the CPU; a GPU needs NVIDIA's driver"
        return [Finding("GPU", None, str(error), advice)], False
    cards = [_card(index, card) for index, card in enumerate(gpus.cards)]
    if gpus.hidden:
        cards.append(_hidden(gpus))
    if not cards:
        cards = [Finding("GPU", None, "the driver sees no card", "models are served on the CPU")]
    driver = _driver(gpus)
    found = any(finding.ok for finding in cards)
    lacking = _lacking(with_cuda) if found else []
    usable = bool(found and driver.ok and not lacking)
    return [driver, *cards, *_links(gpus.links), *lacking], usable


def _driver(gpus: Gpus) -> Finding:
    state = f"{gpus.driver}, for CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}"
    found = re.search(r"\+cu(\d+)\d$", metadata.version("torch"))
    if found is None or int(found[1]) <= gpus.cuda[0]:
        return Finding("NVIDIA driver", True, state)
    advice = f"torch was built for CUDA {found[1]}: take a newer driver, or torch for an older CUDA"
    return Finding("NVIDIA driver", False, f"{state}: too old", advice)


def _card(index: int, card: Gpu) -> Finding:
    major, minor = card.capability
    state = (
        f"{card.name}, compute capability {major}.{minor}, {gib(card.free_bytes)} free of "
        f"{gib(card.total_bytes)}"
    )
    if card.num_programs:
        state += f", in use by {card.num_programs} programs"
    if card.capability >= LEAST_CAPABILITY:
        return Finding(f"GPU {index}", True, state)
    least = ".".join(map(str, LEAST_CAPABILITY))
    return Finding(f"GPU {index}", None, state, f"too old: {least} or newer is needed")


def _hidden(gpus: Gpus) -> Finding:
    """The cards that CUDA does not show."""
    names = ", ".join(card.name for card in gpus.hidden)
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "CUDA does not show them" if setting is None else f"CUDA_VISIBLE_DEVICES is {setting!r}"
    advice = "" if gpus.cards else "models are served on the CPU"
    return Finding("GPUs not used", None, f"{names}: {why}", advice)


def _links(links: tuple[Link, ...]) -> list[Finding]:
    """One line for all pairs of a kind."""
    kinds: dict[tuple[bool, bool], list[Link]] = {}
    for link in links:
        kinds.setdefault((link.peer_access, link.nvlink), []).append(link)
    return [_pairs(*kind, alike, len(links)) for kind, alike in kinds.items()]


def _pairs(peer_access: bool, nvlink: bool, alike: list[Link], num_links: int) -> Finding:
    pairs = ", ".join(f"{link.first}-{link.second}" for link in alike)
    which = f"all {num_links} pairs" if 1 < len(alike) == num_links else pairs
    state = f"{which}: {'NVLink' if nvlink else 'no NVLink'}"
    if peer_access:
        return Finding("GPUs together", True, f"{state}, peer access")
    advice = "--tp over these sums through NCCL and the host, which is slower"
    return Finding("GPUs together", None, f"{state}, no peer access", advice)


def _lacking(with_cuda: bool) -> list[Finding]:
    """What keeps the cards from being used, though they could be."""
    findings = []
    if metadata.version("torch").endswith("+cpu"):
        advice = "for the GPU, torch from pip's own index: pip install --force-reinstall torch"
        findings.append(Finding("GPU use", None, "torch was built without CUDA", advice))
    if not with_cuda:
        advice = "for the GPU, with nvcc on the PATH: make build-gpu"
        state = "the native library was built without CUDA"
        findings.append(Finding("GPU use", None, state, advice))
    return findings
