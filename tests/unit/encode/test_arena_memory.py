"""The arena in host memory: what is given is the memory itself."""

from __future__ import annotations

import pytest

from epdctl.worker.encode.arena_memory import HostArena, gather
from epdctl.worker.transfer.memory import HostMemory

pytestmark = pytest.mark.unit


def test_nothing_is_copied() -> None:
    """Parts and targets are views: what is written into the memory later is seen in them."""
    memory = HostMemory(4096)
    arena = HostArena(memory)
    (part,) = arena.parts(256, 4)
    target = arena.target(256, 4)

    arena.write(256, memoryview(bytearray(b"rows")))

    assert part == target == b"rows"
    assert memory.view(252, 12) == b"\0" * 4 + b"rows" + b"\0" * 4
    assert (arena.address, arena.nbytes) == (memory.address, 4096)


def test_bytes_outside_are_refused() -> None:
    """A write that does not fit is refused whole."""
    arena = HostArena(HostMemory(4096))
    with pytest.raises(ValueError, match="outside of 4096"):
        arena.write(4094, memoryview(bytearray(4)))


def test_parts_are_gathered_in_order() -> None:
    """Parts lie one after another; more of them than fit are an error, not a write behind the end."""
    target = memoryview(bytearray(6))
    gather([memoryview(bytearray(b"abc")), memoryview(bytearray(b"de"))], target)
    assert target == b"abcde\0"

    with pytest.raises(ValueError, match="do not fit"):
        gather([memoryview(bytearray(4))] * 2, target)
