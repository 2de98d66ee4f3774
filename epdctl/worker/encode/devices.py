"""The device of a tower, and what its copies into the host's arena need.

    device = find_device("cuda:0")          # StartFailed says what is missing
    fence = fence_of(device)
    …copies that the device makes on its own…; fence.wait()      # then the host may read them
    pin_host_memory(device, address, nbytes)
    with side_stream(device): …     # copies that do not queue behind the tower's work
    staging_buffer(device, nbytes)  # host memory that the device copies into and out of by itself

On the CPU the fence has nothing to wait for, and nothing is pinned: the callers are the same.

Rules of this file: the only one that knows CUDA. It was written without a GPU at hand: `scripts/gpu-check`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from epdctl.worker.engine import StartFailed


class Fence(Protocol):
    """Between copies that a device makes on its own and the host that reads their results."""

    def wait(self) -> None:
        """Return once every copy that was begun on this thread is complete."""
        ...


class NoFence:
    """The CPU's: its copies are complete when they return."""

    def wait(self) -> None:
        """Return at once."""


class EventFence:
    """CUDA's: an event after the copies, waited for without spinning and without the interpreter's lock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for what the current stream holds now; raises RuntimeError when one of it failed."""
        self._event.record(torch.cuda.current_stream(self._device))
        self._event.synchronize()


def fence_of(device: torch.device) -> Fence:
    """Return the fence for copies from `device` to the host."""
    return EventFence(device) if device.type == "cuda" else NoFence()


def find_device(name: str) -> torch.device:
    """Return the device called `name`: cpu, cuda or cuda:N.

    Raises:
        StartFailed: no such device here; the text says whether torch or the GPU is what is missing.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartFailed(f"--device {name}: no such kind of device (cpu, cuda or cuda:N)") from None
    if device.type not in ("cpu", "cuda") or name.startswith("cpu:"):
        raise StartFailed(f"--device {name}: only cpu, cuda and cuda:N are served")
    if device.type == "cuda":
        _check_cuda(name, device)
    return device


def _check_cuda(name: str, device: torch.device) -> None:
    if torch.version.cuda is None:
        raise StartFailed(f"--device {name}: this build of torch has no CUDA; install a CUDA build of torch")
    found = torch.cuda.device_count()
    if not torch.cuda.is_available() or found == 0:
        raise StartFailed(f"--device {name}: torch finds no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)")
    if device.index is not None and device.index >= found:
        raise StartFailed(f"--device {name}: there are {found} GPUs, cuda:0 to cuda:{found - 1}")
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        raise StartFailed(f"--device {name}: it does not take work ({type(error).__name__})") from error


def pin_host_memory(device: torch.device, address: int, nbytes: int) -> bool:
    """Let `device` copy into host memory at `address` by itself; false where that is not needed or refused.

    Without it copies are right as well, but go through a buffer of the driver and wait for it.
    """
    if device.type != "cuda":
        return False
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        return int(runtime.cudaHostRegister(address, nbytes, 0)) == 0


def staging_buffer(device: torch.device, nbytes: int) -> torch.Tensor:
    """Return bytes of host memory, pinned where `device` can make use of that."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context to enter again and again, on one thread, around copies apart from the tower's work.

    Nothing orders them with other streams: what they read must be complete, and a fence follows them.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
