"""What a process tree costs: processor time and resident memory, from /proc.

Rules of this file: Linux only; a process that ended meanwhile counts for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SCHED_SETATTR_X86_64 = 314


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Processor seconds: `coarse` in clock ticks with ended threads, `fine` in nanoseconds of live ones."""

    coarse: float
    fine: float

    def since(self, before: Cpu) -> float:
        """Return the seconds between two readings: the fine one, unless threads ended in between."""
        coarse, fine = self.coarse - before.coarse, self.fine - before.fine
        return coarse if coarse > fine + 3 * _TICK_S else fine


def process_tree(pid: int) -> Iterator[Path]:
    """Yield the /proc folders of a process and all its descendants."""
    todo = [pid]
    while todo:
        folder = Path(f"/proc/{todo.pop()}")
        yield folder
        with contextlib.suppress(OSError):
            for task in (folder / "task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]


def read_cpu(pid: int) -> Cpu:
    """Return the processor time of a process tree so far."""
    coarse = fine = 0.0
    for folder in process_tree(pid):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            coarse += (int(fields[11]) + int(fields[12])) * _TICK_S
            for task in (folder / "task").iterdir():
                fine += int((task / "schedstat").read_text().split()[0]) / 1e9
    return Cpu(coarse=coarse, fine=fine)


def peak_rss_mb(pid: int) -> float:
    """Return the most resident memory of a process tree since `reset_peak_rss`, in MiB."""
    total = 0
    for folder in process_tree(pid):
        with contextlib.suppress(OSError):
            lines = (folder / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return total / 1024


def reset_peak_rss(pid: int) -> None:
    """Let the peak of a process tree start anew."""
    for folder in process_tree(pid):
        with contextlib.suppress(OSError):
            (folder / "clear_refs").write_text("5")


def ask_for_short_slices(microseconds: int = 100) -> bool:
    """Ask the scheduler for short turns for this process and its children (Linux 6.12 and later).

    The share of a busy machine stays the same, but turns come sooner, so that latencies say more about the
    proxies than about whatever else runs. Returns whether the kernel agreed.
    """
    if os.uname().machine != "x86_64":
        return False
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, microseconds * 1000, 0, 0)
    return bool(ctypes.CDLL(None).syscall(_SCHED_SETATTR_X86_64, 0, ctypes.c_char_p(attributes), 0) == 0)
