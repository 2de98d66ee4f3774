"""The private folder of an engine process's sockets, and the removal of those whose owner was killed.

    folder = SocketFolder(Path(tempfile.gettempdir()))     # exists from now on, and is ours while it is open
    folder.close()                                         # and its files are gone
    sweep(directory, now=time.time())                      # those of dead owners, at the start of a worker

An owner holds a lock on its folder, which ends with the process however that ends.
Rules of this file: only the files that we make are removed, never a folder with anything else in it. A folder
that is younger than `YOUNG_S` is left alone: its owner may be about to lock it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "epdctl-ipc-"
SOCKET_NAMES = ("to-engine", "to-front")
YOUNG_S = 60.0


class SocketFolder:
    """One folder, made and locked; raises OSError when there is no place for it."""

    def __init__(self, directory: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks: nobody can take it for dead there either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the files and the folder, as far as they are there, and let go of the lock."""
        remove_folder(self.path)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def remove_folder(folder: Path) -> bool:
    """Remove the sockets in `folder`, and it when nothing else is in it; false when it stays."""
    for name in SOCKET_NAMES:
        with suppress(OSError):
            (folder / name).unlink()
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def sweep(directory: Path, *, now: float) -> int:
    """Remove this user's folders in `directory` whose owners are dead; return how many. `now`: wall time."""
    removed = 0
    for folder in _old_folders(directory, now):
        with _locked(folder) as is_ours:
            removed += is_ours and remove_folder(folder)
    return removed


def _old_folders(directory: Path, now: float) -> list[Path]:
    """Return the folders of this user that look like ours and are not young."""
    found: list[Path] = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(PREFIX):
                continue
            with suppress(OSError):  # gone meanwhile
                facts = entry.stat(follow_symlinks=False)
                is_mine = entry.is_dir(follow_symlinks=False) and facts.st_uid == os.geteuid()
                if is_mine and now - facts.st_mtime >= YOUNG_S:
                    found.append(Path(entry.path))
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder for as long as the block runs; give false where its owner has it."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)
