"""An arena in the memory of a tower's device: the same bytes as in host memory, through a buffer.

Devices are the CPU and, where there is one, the GPU.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3

from epdctl.worker.encode import device_arena
from epdctl.worker.encode.arena_memory import ArenaMemory, HostArena
from epdctl.worker.encode.cache import Facts
from epdctl.worker.encode.device_arena import DeviceArena
from epdctl.worker.encode.devices import fence_of
from epdctl.worker.encode.dram import Slot
from epdctl.worker.encode.forward import Job, run_batch
from epdctl.worker.encode.layout import PATCHES, ItemLayout
from epdctl.worker.encode.mover import Mover
from epdctl.worker.encode.vision import Outputs
from epdctl.worker.engine import StartFailed
from epdctl.worker.transfer.arena import Region
from epdctl.worker.transfer.memory import HostMemory

pytestmark = [pytest.mark.unit, pytest.mark.worker]

STAGING = 1000
"""Bytes of the buffer: smaller than the items here, and no divisor of their sizes."""


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return each device of this machine."""
    return torch.device(str(request.param))


@pytest.fixture
def memory(device: torch.device) -> DeviceArena:
    """Return an arena of 64 KiB."""
    return DeviceArena(device, 65536, staging_bytes=STAGING)


def content(nbytes: int, seed: int = 1) -> memoryview:
    """Return bytes that differ from place to place."""
    return memoryview(bytearray((seed + at * 7 + at // 251) % 256 for at in range(nbytes)))


def read(memory: ArenaMemory, offset: int, nbytes: int) -> bytes:
    """Return bytes of an arena."""
    return b"".join(bytes(part) for part in memory.parts(offset, nbytes))


@pytest.mark.parametrize("nbytes", [0, 1, STAGING - 1, STAGING, STAGING + 1, 3 * STAGING + 5])
def test_what_is_written_is_read(memory: DeviceArena, nbytes: int) -> None:
    """Bytes of any length come back in order, and their neighbours stay as they were."""
    memory.write(0, content(8192, seed=9))
    memory.write(256, content(nbytes))

    assert read(memory, 256, nbytes) == content(nbytes)
    assert read(memory, 0, 256) == content(8192, seed=9)[:256]
    assert read(memory, 256 + nbytes, 500) == content(8192, seed=9)[256 + nbytes : 756 + nbytes]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (65533, 4), (0, -1), (65536, 1)])
def test_bytes_outside_are_refused(memory: DeviceArena, offset: int, nbytes: int) -> None:
    """No tower, reader or writer gets at what lies before or behind the arena."""
    with pytest.raises(ValueError, match="outside of 65536"):
        memory.target(offset, nbytes)
    with pytest.raises(ValueError, match="outside of 65536"):
        memory.parts(offset, nbytes)
    with pytest.raises(ValueError, match="outside of 65536"):
        memory.write(65533, content(4))


def test_its_address_is_that_of_its_bytes(memory: DeviceArena) -> None:
    """What Mooncake is told is where the bytes are, and they are zero at the start."""
    assert memory.address == memory.target(0, 1).data_ptr()
    assert memory.address + 512 == memory.target(512, 1).data_ptr()
    assert (memory.nbytes, set(read(memory, 0, 65536))) == (65536, {0})


def test_a_part_is_given_only_after_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is waited for before it is read; its buffer is filled again only when more is asked for."""
    steps: list[str] = []
    fence = SimpleNamespace(wait=lambda: steps.append("wait"))
    monkeypatch.setattr(device_arena, "fence_of", lambda device: fence)
    memory = DeviceArena(torch.device("cpu"), 4096, staging_bytes=STAGING)
    assert steps == ["wait"], "the zeros are there before anybody writes"

    steps.extend("read" for _ in memory.parts(0, 2 * STAGING))
    memory.write(0, content(2 * STAGING))

    assert steps == ["wait", *["wait", "read"] * 2, "wait", "wait"]


def test_threads_do_not_share_a_buffer(memory: DeviceArena) -> None:
    """A part stays right while other threads read and write: the digest and the lower tiers run together."""
    memory.write(0, content(STAGING))
    part = next(iter(memory.parts(0, STAGING)))
    before = threading.active_count()
    with ThreadPoolExecutor(1) as other:
        other.submit(memory.write, 8192, content(STAGING, seed=5)).result()
        assert other.submit(read, memory, 8192, STAGING).result() == content(STAGING, seed=5)

    assert bytes(part) == content(STAGING)
    assert threading.active_count() == before


def test_a_device_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena that the device has no memory for is a start that failed, with both flags in its text."""

    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_arena.torch, "zeros", zeros)
    with pytest.raises(StartFailed, match=r"--arena device: cpu has no room .* 4096 bytes.*--arena host"):
        DeviceArena(torch.device("cpu"), 4096)


@pytest.mark.parametrize("levels", [1, 3])
def test_a_forward_leaves_the_same_rows_and_digest(device: torch.device, levels: int) -> None:
    """Rows of a batch, cast and with their levels side by side, are those of an arena in host memory."""
    memory = DeviceArena(device, 65536, staging_bytes=STAGING)
    layout = ItemLayout(rows=40, pixel_shape=(4,), forward_group=PATCHES)
    items = [tuple(torch.rand(40, 16, device=device) for _ in range(levels)) for _ in range(2)]
    tower: Any = SimpleNamespace(
        encode=lambda batch: Outputs(items=tuple(items), dtype=torch.bfloat16), fence=fence_of(device)
    )
    nbytes = 40 * 16 * 2 * levels
    results = []
    host = HostArena(HostMemory(65536))
    for arena in (memory, host):
        places = [Region(0, nbytes, nbytes, 1), Region(16384, nbytes, nbytes, 2)]
        pixels = content(16)
        jobs = [Job(pixels=pixels, layout=layout, memory=arena, region=place) for place in places]
        results.append(run_batch(tower, jobs))

    assert results[0] == results[1]
    for offset, digest, levels_of_item in zip((0, 16384), results[0], items, strict=True):
        rows = read(memory, offset, nbytes)
        assert rows == read(host, offset, nbytes)
        assert digest == blake3(rows).hexdigest()
        expected = torch.cat(levels_of_item, dim=1).to("cpu", torch.bfloat16)
        assert torch.equal(torch.frombuffer(bytearray(rows), dtype=torch.bfloat16).view(40, -1), expected)


async def test_rows_leave_for_host_memory_and_come_back(memory: DeviceArena) -> None:
    """What is evicted lies in host memory, and a promotion or a stored value lands where it should."""
    mover = Mover(memory)
    memory.write(0, content(2 * STAGING + 3))
    facts = Facts(rows=1, width=4, dtype="float32", digest="d", metadata={})
    slot = Slot("k", 2 * STAGING + 3, facts)

    mover.demote(slot, Region(0, slot.nbytes, 2048, 1))
    assert await mover.promote(slot, Region(8192, slot.nbytes, 2048, 2))
    await mover.fill(content(50, seed=3), Region(0, 50, 256, 3))
    mover.close()

    assert slot.rows == content(slot.nbytes)
    assert read(memory, 8192, slot.nbytes) == content(slot.nbytes)
    assert read(memory, 0, 50) == content(50, seed=3)
