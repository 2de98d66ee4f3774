"""Claims about devices that hold without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from epdctl.worker.encode import devices
from epdctl.worker.encode.arena_memory import HostArena
from epdctl.worker.encode.devices import NoFence, fence_of, find_device, pin_host_memory
from epdctl.worker.engine import StartFailed
from epdctl.worker.transfer.arena import Region
from epdctl.worker.transfer.memory import HostMemory

pytestmark = [pytest.mark.unit, pytest.mark.worker]


def test_the_cpu_needs_nothing() -> None:
    """On the CPU there is no event to wait for, and no memory is pinned."""
    memory = HostMemory(4096)

    assert find_device("cpu").type == "cpu"
    assert isinstance(fence_of(torch.device("cpu")), NoFence)
    assert not pin_host_memory(torch.device("cpu"), memory.address, memory.nbytes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpu", "no such kind of device"),
        ("meta", "only cpu, cuda and cuda:N"),
        ("cpu:3", "only cpu, cuda and cuda:N"),
    ],
)
def test_other_kinds_are_refused(name: str, reason: str) -> None:
    """A name that torch does not know, or that is no place to compute, is refused by name."""
    with pytest.raises(StartFailed, match=f"--device {name}: .*{reason}"):
        find_device(name)


def test_a_build_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is a CUDA build of torch, and the text says so."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(StartFailed, match="--device cuda: this build of torch has no CUDA"):
        find_device("cuda")


def test_a_machine_without_that_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CUDA build, no GPU and too high a number are told apart."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    here = SimpleNamespace(device_count=lambda: 0, is_available=lambda: False)
    monkeypatch.setattr(devices.torch, "cuda", here)
    with pytest.raises(StartFailed, match="torch finds no GPU"):
        find_device("cuda:0")

    here.device_count, here.is_available = lambda: 2, lambda: True
    with pytest.raises(StartFailed, match="there are 2 GPUs, cuda:0 to cuda:1"):
        find_device("cuda:2")


def test_the_fence_is_waited_for_between_copy_and_digest() -> None:
    """Rows are digested only after the copies of the whole batch were waited for."""
    from epdctl.worker.encode import forward

    steps: list[str] = []

    class Outputs:
        def copy_rows(self, index: int, target: memoryview) -> None:
            steps.append(f"copy {index}")

    class Memory(HostArena):
        def parts(self, offset: int, nbytes: int) -> Iterable[memoryview]:
            steps.append("digest")
            return super().parts(offset, nbytes)

    tower = SimpleNamespace(
        encode=lambda items: Outputs(), fence=SimpleNamespace(wait=lambda: steps.append("wait"))
    )
    job = forward.Job(
        pixels=memoryview(bytearray(4)),
        layout=SimpleNamespace(pixel_shape=(1,)),  # type: ignore[arg-type]
        memory=Memory(HostMemory(4)),
        region=Region(0, 4, 256, 1),
    )
    forward.run_batch(tower, [job, job])  # type: ignore[arg-type]

    assert steps == ["copy 0", "copy 1", "wait", "digest", "digest"]
