"""The cache's arena in the memory of the tower's device: an `arena_memory.ArenaMemory`.

    memory = DeviceArena(device, nbytes)        # StartFailed: the device has no room for it

A tower's rows are copied from device to device. Whoever needs bytes on the host (the digest, the lower tiers)
gets them in parts through a buffer of its thread, which the device copies into by itself.

Rules of this file: works with any device of torch, so that tests run it on the CPU; what CUDA needs is in
`devices`. Each thread has a buffer, a stream and a fence of its own: no locks, and no copy waits for the
tower. A buffer is read only after the fence, and filled again only after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import torch

from epdctl.worker.encode.arena_memory import copy
from epdctl.worker.encode.devices import fence_of, side_stream, staging_buffer
from epdctl.worker.engine import StartFailed

STAGING_BYTES = 4 * 1024 * 1024
STAGINGS = 3
"""Made at the start, where a lack of memory can be told: for the tower, the mover and the store."""


class _Staging:
    """One thread's way between host and device."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.buffer = staging_buffer(device, nbytes)
        self.view = self.buffer.numpy().data
        self._stream = side_stream(device)
        self._fence = fence_of(device)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy between device and buffer; complete on return."""
        with self._stream:
            target.copy_(source, non_blocking=True)
            self._fence.wait()


class DeviceArena:
    """See the module."""

    def __init__(self, device: torch.device, nbytes: int, *, staging_bytes: int = STAGING_BYTES) -> None:
        try:
            self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            self._spare = [_Staging(device, staging_bytes) for _ in range(STAGINGS)]
        except RuntimeError as error:
            raise StartFailed(
                f"--arena device: {device} has no room for an arena of {nbytes} bytes, or the host none for"
                " its buffers; give fewer --cache-bytes, or --arena host"
            ) from error
        # The zeros must not come after what other streams write.
        fence_of(device).wait()
        self._device = device
        self._staging_bytes = staging_bytes
        self._threads = threading.local()
        self.address = self._bytes.data_ptr()
        self.nbytes = nbytes

    def target(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return the bytes themselves, a tensor on the device."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} are outside of {self.nbytes}")
        return self._bytes[offset : offset + nbytes]

    def parts(self, offset: int, nbytes: int) -> Iterable[memoryview]:
        """Return the bytes, copied to the host part by part as they are asked for."""
        return self._staged(self.target(offset, nbytes))

    def _staged(self, source: torch.Tensor) -> Iterator[memoryview]:
        staging = self._staging()
        for piece in self._pieces(source):
            staging.move(piece, staging.buffer[: piece.numel()])
            yield staging.view[: piece.numel()]

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` to the device; see `ArenaMemory`."""
        staging, at = self._staging(), 0
        for piece in self._pieces(self.target(offset, data.nbytes)):
            copy(data[at : at + piece.numel()], staging.view)
            staging.move(staging.buffer[: piece.numel()], piece)
            at += piece.numel()

    def _pieces(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        size = self._staging_bytes
        return (whole[at : at + size] for at in range(0, whole.numel(), size))

    def _staging(self) -> _Staging:
        mine: _Staging | None = getattr(self._threads, "staging", None)
        if mine is None:
            mine = self._spare.pop() if self._spare else _Staging(self._device, self._staging_bytes)
            self._threads.staging = mine
        return mine
