"""The memory under an arena: one anonymous mapping of the host, every page touched before it is used.

    memory = HostMemory(nbytes)
    memory.address                       # of byte 0, for Mooncake
    memory.view(offset, nbytes)          # writable memoryview of unsigned bytes
    memory.close()

Rules of this file: nothing here knows what the bytes mean. Pages are touched at start, since the first write
into an untouched page would pay its fault on the request path (20 to 130 ms for 64 MB).
"""

from __future__ import annotations

import ctypes
import mmap

PAGE = mmap.PAGESIZE


class HostMemory:
    """`nbytes` of zeroed, private, page-aligned host memory."""

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"memory has at least one byte, got {nbytes}")
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self._mapping = mmap.mmap(-1, nbytes, flags=flags)
        anchor = ctypes.c_char.from_buffer(self._mapping)
        self.address = ctypes.addressof(anchor)
        # The ctypes object would keep the mapping from being closed for as long as it lives.
        del anchor
        self._view = memoryview(self._mapping)
        if not hasattr(mmap, "MAP_POPULATE"):
            self._touch()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes from `offset`; raise ValueError when they are not all inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} are outside of {self.nbytes}")
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap the memory, or leave that to the last view of it that is still in use."""
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:
            # Somebody still reads a view: unmapping under it would be a crash, so its end unmaps.
            return

    def _touch(self) -> None:
        for offset in range(0, self.nbytes, PAGE):
            self._view[offset] = 0
