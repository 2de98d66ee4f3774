"""Whether the memory that a worker is told to take is there, asked before anything slow is started.

    check_memory([("--cache-bytes", 2**30), ("--cache-dram-bytes", 2**32)], times=2)     # raises StartFailed

Rules of this file: reads /proc and /sys, takes nothing. A mapping whose pages are touched at once does not
fail where memory is short: the kernel ends the process instead, or it swaps. What cannot be found out is no
reason to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from epdctl.worker.engine import StartFailed

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def check_memory(
    wanted: Sequence[tuple[str, int]], *, times: int = 1, proc: Path = PROC, cgroups: Path = CGROUPS
) -> None:
    """Return when there is memory for the bytes of each flag, `times` over (one for each engine).

    Raises:
        StartFailed: it is more than there is; flags, asked and available bytes are named.
    """
    asked = times * sum(nbytes for _, nbytes in wanted)
    available = available_bytes(proc, cgroups)
    if available is None or asked <= available:
        return
    flags = " and ".join(f"{flag} {nbytes}" for flag, nbytes in wanted if nbytes)
    each = f" for each of {times} engines" if times > 1 else ""
    raise StartFailed(
        f"{flags}{each}: that takes {asked} bytes of memory, and {available} are available here: give fewer"
    )


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return how many bytes this process can take without swapping: the machine's, or its cgroup's."""
    left = [value for value in (_of_machine(proc), *_of_groups(proc, cgroups)) if value is not None]
    return min(left, default=None)


def _of_machine(proc: Path) -> int | None:
    kib = _fields(proc / "meminfo").get("MemAvailable:")
    return None if kib is None else kib * 1024


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int | None]:
    """Yield what is left in this process's cgroup (version 2) and in those around it."""
    lines = (
        line.removeprefix("0::") for line in _text(proc / "self/cgroup").splitlines() if line[:3] == "0::"
    )
    path = Path(next(lines, "/").lstrip("/"))
    for group in (path, *path.parents):
        yield _of_group(cgroups / group)


def _of_group(folder: Path) -> int | None:
    limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None
    # Files that were read count as used, and go when their memory is wanted.
    files = _fields(folder / "memory.stat").get("inactive_file", 0)
    return max(0, int(limit) - int(used) + files)


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
