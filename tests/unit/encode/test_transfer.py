"""Opening the producer's end on an arena in device memory: what a Mooncake that cannot read it leads to."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import pytest

from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode import transfer
from epdctl.worker.encode.arena_memory import HostArena
from epdctl.worker.encode.messages import EncodeEngineSettings
from epdctl.worker.engine import StartFailed
from epdctl.worker.transfer import mooncake
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferSetupFailed, Wheel, find_wheel

pytestmark = pytest.mark.unit

CPU = Wheel(name="mooncake-transfer-engine-non-cuda", version="0.3.13", extra="cpu")
CUDA = Wheel(name="mooncake-transfer-engine-cuda13", version="0.3.13", extra="cuda13")


class RefusingEngine:
    """A transfer engine that takes no memory."""

    def __init__(self, **options: Any) -> None:
        """Start."""

    def register(self, address: int, nbytes: int) -> None:
        """Refuse."""
        raise TransferSetupFailed(f"Mooncake refused to register {nbytes} bytes of memory (code -5)")


def settings_of(arena: str) -> EncodeEngineSettings:
    """Return an engine's settings."""
    return EncodeEngineSettings(
        folder="m",
        dtype="auto",
        device="cuda:0",
        threads=1,
        arena=arena,
        cache_bytes=4096,
        max_batch_tokens=8,
        max_batch_items=8,
        max_asked=2,
        max_pending_pixel_bytes=4096,
        reply_after="push",
        host="127.0.0.1",
        mooncake_protocol="tcp",
    )


async def refusal(monkeypatch: pytest.MonkeyPatch, arena: str, wheel: Wheel | None) -> str:
    """Return why the end was not opened with `wheel`, whose engine takes no memory."""
    monkeypatch.setattr(transfer, "TransferEngine", RefusingEngine)
    monkeypatch.setattr(transfer, "find_wheel", lambda: wheel)
    with pytest.raises(StartFailed) as refused:
        await transfer.open_transfer(settings_of(arena), HostArena(HostMemory(4096)), WorkerMetrics())
    return str(refused.value)


async def test_a_wheel_without_cuda_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel without CUDA registers any address, so it is not even asked; the text names every way out."""
    text = await refusal(monkeypatch, "device", CPU)

    assert text.startswith("--arena device: mooncake-transfer-engine-non-cuda 0.3.13 (epdctl[cpu])")
    assert "epdctl[cuda12] or epdctl[cuda13]" in text and text.endswith("--arena host")
    assert "refused to register" not in text


@pytest.mark.parametrize(
    ("wheel", "name"),
    [(CUDA, "mooncake-transfer-engine-cuda13 0.3.13"), (None, "the Mooncake that is installed")],
)
async def test_refused_device_memory_names_the_wheel(
    monkeypatch: pytest.MonkeyPatch, wheel: Wheel | None, name: str
) -> None:
    """Memory of a device that is not registered ends the start, with the wheel, its reason and the cure."""
    text = await refusal(monkeypatch, "device", wheel)

    assert re.match(f"--arena device: {re.escape(name)}.*refused to register 4096 bytes", text)
    assert text.endswith("--arena host")


async def test_refused_host_memory_says_nothing_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arena in host memory no wheel is looked at, and the reason stands alone."""
    assert await refusal(monkeypatch, "host", CPU) == (
        "Mooncake refused to register 4096 bytes of memory (code -5)"
    )


def test_the_installed_wheel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the three wheels is named with its version and extra; without any, none is."""
    versions = {"mooncake-transfer-engine": "0.4"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(mooncake.metadata, "version", version)
    found = find_wheel()
    assert (str(found), found and found.has_cuda) == ("mooncake-transfer-engine 0.4 (epdctl[cuda12])", True)
    versions.clear()
    assert find_wheel() is None
    assert not CPU.has_cuda
