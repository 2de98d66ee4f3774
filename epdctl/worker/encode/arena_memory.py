"""The memory under the cache's arena as its readers and writers see it, wherever it lies.

    memory.address, memory.nbytes           # for Mooncake, which reads it by itself
    memory.target(offset, nbytes)           # what a tower copies an item's rows into
    for part in memory.parts(offset, nbytes): …     # the bytes, on the host, in order
    memory.write(offset, data)              # bytes of the host into it
    gather(memory.parts(offset, nbytes), rows)

`HostArena` here gives views of host memory and copies nothing. `device_arena.DeviceArena` is the other one.

Rules of this file: no torch. `ctypes.memmove` lets other threads run meanwhile; assigning to a slice of a
memoryview would not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Protocol

from epdctl.worker.transfer.memory import HostMemory


class ArenaMemory(Protocol):
    """Bytes that Mooncake reads. Ranges that are not all inside raise ValueError."""

    @property
    def address(self) -> int:
        """Of byte 0: of the host, or of a device."""
        ...

    @property
    def nbytes(self) -> int:
        """Size."""
        ...

    def target(self, offset: int, nbytes: int) -> Any:
        """Return what `vision.Outputs.copy_rows` takes: a writable memoryview, or a tensor of bytes."""
        ...

    def parts(self, offset: int, nbytes: int) -> Iterable[memoryview]:
        """Return the bytes in order. A part is right until its thread asks for another part of any bytes.

        Everything that was written there must be complete (a tower's fence waited for).
        """
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Copy writable bytes of the host to `offset`; complete on return. Other threads run meanwhile."""
        ...


class HostArena:
    """Host memory: its parts are one view, and rows are copied straight into it."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    @property
    def address(self) -> int:
        """See `ArenaMemory`."""
        return self._memory.address

    @property
    def nbytes(self) -> int:
        """See `ArenaMemory`."""
        return self._memory.nbytes

    def target(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes themselves."""
        return self._memory.view(offset, nbytes)

    def parts(self, offset: int, nbytes: int) -> Iterable[memoryview]:
        """Return the bytes themselves, as one part."""
        return (self._memory.view(offset, nbytes),)

    def write(self, offset: int, data: memoryview) -> None:
        """See `ArenaMemory`."""
        copy(data, self._memory.view(offset, data.nbytes))


def gather(parts: Iterable[memoryview], target: memoryview) -> None:
    """Copy `parts` one after another to the start of `target`."""
    at = 0
    for part in parts:
        copy(part, target[at:])
        at += part.nbytes


def copy(source: memoryview, target: memoryview) -> None:
    """Copy the bytes of `source` to the start of `target`, other threads running meanwhile; both writable."""
    if source.nbytes > target.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
    ctypes.memmove(_address(target), _address(source), source.nbytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
