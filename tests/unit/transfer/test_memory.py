"""Claims about the memory under an arena."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from epdctl.worker.transfer.memory import HostMemory

pytestmark = pytest.mark.unit


def resident_bytes() -> int:
    """Return this process's anonymous resident bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_a_view_and_the_address_are_the_same_bytes() -> None:
    """What is written through a view is found at the address, and the other way round."""
    memory = HostMemory(4096)
    memory.view(100, 4)[:] = b"abcd"
    ctypes.memmove(memory.address + 200, b"efgh", 4)

    assert ctypes.string_at(memory.address + 100, 4) == b"abcd"
    assert bytes(memory.view(200, 4)) == b"efgh"


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (4096, 1), (4000, 97), (0, -1)])
def test_a_view_is_inside(offset: int, nbytes: int) -> None:
    """A view that would leave the memory is refused."""
    memory = HostMemory(4096)

    with pytest.raises(ValueError, match="outside"):
        memory.view(offset, nbytes)


def test_pages_are_there_from_the_start() -> None:
    """The memory is resident before its first use, so that no request pays for page faults."""
    before = resident_bytes()
    memory = HostMemory(64 << 20)

    assert resident_bytes() - before > 60 << 20
    memory.close()


def test_a_view_in_use_outlives_the_close() -> None:
    """Closing does not pull the memory from under somebody who still reads it."""
    memory = HostMemory(4096)
    view = memory.view(0, 4)
    view[:] = b"abcd"
    memory.close()

    assert bytes(view) == b"abcd"


def test_no_memory_is_refused() -> None:
    """Memory of no bytes is an error where it is asked for."""
    with pytest.raises(ValueError, match="at least one byte"):
        HostMemory(0)
