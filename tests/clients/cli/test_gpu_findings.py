from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest

from slotwise_cli import doctor as doctor_module
from slotwise_cli import gpu_findings as module
from slotwise_cli.finding import Finding
from slotwise_cli.gpu_findings import gpu_findings
from slotwise_cli.gpus import Gpu, Link, NoDriverError, find_gpus

H200 = Gpu("NVIDIA H200", (9, 0), 150 << 30, 140 << 30, 0)


class NvmlError(Exception):
    pass


class LibraryNotFoundError(NvmlError):
    pass


class DriverNotLoadedError(NvmlError):
    pass


class FakeNvml:
    """A driver with these cards; `nvlinks` and `peers` are the pairs that have it."""

    NVMLError = NvmlError
    NVMLError_LibraryNotFound = LibraryNotFoundError
    NVMLError_DriverNotLoaded = DriverNotLoadedError
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_CAPS_INDEX_READ = 10
    NVML_P2P_CAPS_INDEX_NVLINK = 12

    def __init__(self, *cards: Gpu, nvlinks=(), peers=(), version=13000, error=None):
        self.cards, self.version, self.error = cards, version, error
        self.pairs = {10: set(peers), 12: set(nvlinks)}
        self.open = False

    def nvmlInit(self):  # noqa: N802
        if self.error:
            raise self.error
        self.open = True

    def nvmlShutdown(self):  # noqa: N802
        self.open = False

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{uuid.UUID(int=handle)}"

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.1"

    def nvmlSystemGetCudaDriverVersion_v2(self):  # noqa: N802
        return self.version

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        assert self.open
        card = self.cards[handle]
        return SimpleNamespace(total=card.total_bytes, free=card.free_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        if self.cards[handle].num_programs < 0:
            raise NvmlError("Not Supported")
        return [object()] * self.cards[handle].num_programs

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return list(self.cards[handle].capability)

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self.cards[handle].name

    def nvmlDeviceGetP2PStatus(self, first, second, index):  # noqa: N802
        return 0 if (first, second) in self.pairs[index] else 5


class FakeCuda:
    """The CUDA of a FakeNvml that shows these of its cards, in this order."""

    def __init__(self, *shown, status=0):
        self.shown = shown
        self.status = status or (0 if shown else 100)

    def cuInit(self, flags):  # noqa: N802
        return self.status

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = len(self.shown)
        return 0

    def cuDeviceGet(self, device, index):  # noqa: N802
        device._obj.value = 70 + index
        return 0

    def cuDeviceGetUuid_v2(self, number, device):  # noqa: N802
        number.raw = uuid.UUID(int=self.shown[device.value - 70]).bytes
        return 0


def look(nvml, cuda=None):
    """find_gpus; CUDA shows all cards in NVML's order unless another is given."""
    return find_gpus(nvml, cuda or FakeCuda(*range(len(nvml.cards))))


@pytest.fixture
def driver(monkeypatch):
    """Puts a driver in the place of this machine's, and a torch with CUDA in that of the real."""

    def use(nvml, cuda=None, torch="2.13.0+cu130"):
        monkeypatch.setattr(module, "find_gpus", lambda: look(nvml, cuda))
        monkeypatch.setattr(module.metadata, "version", lambda name: torch)

    return use


def found(with_cuda=True) -> tuple[dict[str, Finding], bool]:
    findings, usable = gpu_findings(with_cuda)
    return {finding.what: finding for finding in findings}, usable


def test_what_the_driver_says():
    nvml = FakeNvml(H200, H200, H200, nvlinks=[(0, 1)], peers=[(0, 1), (1, 2)], version=12080)
    gpus = look(nvml)
    assert (gpus.driver, gpus.cuda) == ("580.1", (12, 8))
    assert gpus.cards == (H200,) * 3
    assert gpus.links == (
        Link(0, 1, True, True),
        Link(0, 2, False, False),
        Link(1, 2, True, False),
    )
    assert not nvml.open


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LibraryNotFoundError(), "no NVIDIA driver"),
        (DriverNotLoadedError(), "no NVIDIA driver"),
        (NvmlError("Driver/library version mismatch"), "version mismatch"),
    ],
)
def test_a_driver_that_cannot_be_asked(error, said):
    with pytest.raises(NoDriverError, match=said):
        look(FakeNvml(error=error))


def test_a_driver_that_fails_while_it_is_asked():
    nvml = FakeNvml(H200)
    nvml.nvmlDeviceGetName = lambda handle: (_ for _ in ()).throw(NvmlError("GPU is lost"))
    with pytest.raises(NoDriverError, match="GPU is lost"):
        look(nvml)
    assert not nvml.open


TITAN = Gpu("NVIDIA TITAN V", (7, 0), 12 << 30, 12 << 30, 0)
A100 = Gpu("NVIDIA A100", (8, 0), 80 << 30, 80 << 30, 0)


@pytest.mark.parametrize(
    ("shown", "cards", "hidden", "links"),
    [
        ((0, 1, 2), (TITAN, A100, H200), (), {(0, 1)}),
        # As CUDA does by itself: the fastest first.
        ((2, 1, 0), (H200, A100, TITAN), (), {(1, 2)}),
        ((1, 0), (A100, TITAN), (H200,), {(0, 1)}),
        ((2,), (H200,), (TITAN, A100), set()),
        ((), (), (TITAN, A100, H200), set()),
    ],
)
def test_cards_are_counted_as_cuda_counts_them(shown, cards, hidden, links):
    nvml = FakeNvml(TITAN, A100, H200, nvlinks=[(0, 1), (1, 0)])
    gpus = look(nvml, FakeCuda(*shown))
    assert (gpus.cards, gpus.hidden) == (cards, hidden)
    assert {(link.first, link.second) for link in gpus.links if link.nvlink} == links


class OldCuda(FakeCuda):
    """Without the call for the UUID."""

    cuDeviceGetUuid_v2 = property()  # noqa: N815


@pytest.mark.parametrize("cuda", [FakeCuda(0, status=802), FakeCuda(0, 9), OldCuda(1, 0)])
def test_without_an_answer_of_cuda_the_order_is_nvmls(cuda):
    """It does not start, it names a part of a card, or it is too old to name any."""
    gpus = look(FakeNvml(TITAN, H200), cuda)
    assert (gpus.cards, gpus.hidden) == ((TITAN, H200), ())


def test_hidden_cards_are_told(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    driver(FakeNvml(TITAN, H200, A100), FakeCuda(1))
    findings, usable = found()
    assert usable
    assert findings["GPU 0"].state.startswith("NVIDIA H200,")
    assert "GPU 1" not in findings
    assert findings["GPUs not used"].state == (
        "NVIDIA TITAN V, NVIDIA A100: CUDA_VISIBLE_DEVICES is '1'"
    )


def test_all_cards_are_hidden(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver(FakeNvml(H200, H200), FakeCuda())
    findings, usable = found()
    assert not usable
    hidden = findings["GPUs not used"]
    assert hidden.ok is None
    assert hidden.state == "NVIDIA H200, NVIDIA H200: CUDA_VISIBLE_DEVICES is ''"
    assert hidden.advice == "models are served on the CPU"


def test_a_container_that_hides_programs():
    hidden = Gpu("NVIDIA H200", (9, 0), 1, 1, -1)
    assert look(FakeNvml(hidden)).cards[0].num_programs == 0


def test_one_card(driver):
    driver(FakeNvml(H200))
    findings, usable = found()
    assert usable
    assert findings["NVIDIA driver"] == Finding("NVIDIA driver", True, "580.1, for CUDA up to 13.0")
    assert findings["GPU 0"].state == (
        "NVIDIA H200, compute capability 9.0, 140.00 GiB free of 150.00 GiB"
    )
    assert "GPUs together" not in findings
    assert "GPU use" not in findings


def test_other_programs_are_told(driver):
    driver(FakeNvml(Gpu("NVIDIA H200", (9, 0), 150 << 30, 10 << 30, 2)))
    assert found()[0]["GPU 0"].state.endswith("in use by 2 programs")


def test_pairs_that_are_alike_are_one_line(driver):
    pairs = [(0, 1), (0, 2), (1, 2)]
    driver(FakeNvml(H200, H200, H200, nvlinks=pairs, peers=pairs))
    together = found()[0]["GPUs together"]
    assert (together.ok, together.state) == (True, "all 3 pairs: NVLink, peer access")


def test_pairs_that_differ_are_named(driver):
    driver(FakeNvml(H200, H200, H200, nvlinks=[(0, 1)], peers=[(0, 1)]))
    together = [f for f in gpu_findings(True)[0] if f.what == "GPUs together"]
    assert [(f.ok, f.state) for f in together] == [
        (True, "0-1: NVLink, peer access"),
        (None, "0-2, 1-2: no NVLink, no peer access"),
    ]
    assert "NCCL" in together[1].advice


def test_an_old_card_is_no_fault_but_does_not_serve(driver):
    driver(FakeNvml(Gpu("Tesla T4", (7, 5), 16 << 30, 15 << 30, 0)))
    findings, usable = found()
    assert not usable
    assert findings["GPU 0"].ok is None
    assert "8.0 or newer" in findings["GPU 0"].advice


def test_an_old_driver_is_a_fault(driver):
    driver(FakeNvml(H200, version=12080))
    findings, usable = found()
    assert not usable
    assert findings["NVIDIA driver"].ok is False
    assert "CUDA 13" in findings["NVIDIA driver"].advice
    driver(FakeNvml(H200, version=12080), torch="2.13.0+cu128")
    assert found()[1]


def test_what_keeps_a_card_from_being_used(driver):
    driver(FakeNvml(H200), torch="2.13.0+cpu")
    findings, usable = gpu_findings(False)
    assert not usable
    said = [finding.state for finding in findings if finding.what == "GPU use"]
    assert said == [
        "torch was built without CUDA",
        "the native library was built without CUDA",
    ]


@pytest.mark.parametrize("nvml", [FakeNvml(error=LibraryNotFoundError()), FakeNvml()])
def test_without_a_card_the_cpu_serves(driver, nvml):
    driver(nvml)
    findings, usable = found()
    assert not usable
    assert findings["GPU"].ok is None
    assert "CPU" in findings["GPU"].advice


def test_the_doctor_says_no_driver_and_goes_on(slotwise, monkeypatch):
    monkeypatch.setattr(module, "find_gpus", lambda: look(FakeNvml(error=LibraryNotFoundError())))
    done = slotwise("doctor", "--server", "127.0.0.1:1")
    assert done.code == 0
    assert "GPU: no NVIDIA driver" in done.out


@pytest.mark.parametrize(
    ("words", "usable", "flags"),
    [
        ((), True, ["--device", "cuda"]),
        ((), False, []),
        (("--device", "cpu"), True, ["--device", "cpu"]),
    ],
)
def test_a_plan_is_for_the_gpu_that_would_serve(
    slotwise, monkeypatch, tmp_path, words, usable, flags
):
    asked = []

    def plan(folder, flags):
        asked.append(flags)
        return {"ranks": []}

    monkeypatch.setattr(doctor_module, "_plan", plan)
    monkeypatch.setattr(doctor_module, "gpu_findings", lambda with_cuda: ([], usable))
    slotwise("doctor", str(tmp_path), *words, "--server", "127.0.0.1:1")
    assert asked == [flags]
