"""A file system that is full when a test says so.

Rules of this file: what is full is real. With the right to mount, it is a small tmpfs that is filled up; else
the processes under test get a limit on the size of their files, which fails their writes in the same place.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE_KIB = 2048
TINY_BYTES = 64


class SmallDisk:
    """A folder for the files under test."""

    def __init__(self, path: Path, *, is_mounted: bool) -> None:
        self.path = path
        self._filler = path / "filler"
        self._is_mounted = is_mounted
        self._limited: list[int] = []

    def fill(self, pids: Sequence[int]) -> None:
        """Let `pids` find no more space."""
        if not self._is_mounted:
            self._limit(pids, TINY_BYTES)
            return
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    def empty(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)
        self._limit(self._limited, resource.RLIM_INFINITY)

    def _limit(self, pids: Sequence[int], nbytes: int) -> None:
        for pid in pids:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes if hard < 0 else min(nbytes, hard), hard))
        self._limited = list(pids)


@contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """Make a small file system at `path`, a new folder; it is gone afterwards."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "tmpfs", str(path)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(path, is_mounted=is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)
