"""Writes embeddings into a folder that consumers read: a shared file system, as ECExampleConnector uses it.

A file is written under a name of its own in `<folder>/.epdctl`, synchronised, and renamed: whoever finds it
under its name finds all of it, also after a crash of the machine. Renaming is also what lets two encoders
write the same item at once.

Rules of this file: it blocks, so it runs on threads. Only files that it made are removed, and folders are
made one level deep: a folder that has gone is not made anew. The operating system's failures become ours
here; paths go into the log, never into a message.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from epdctl.errors import StorageFull, StorageUnavailable
from epdctl.worker.transfer.digest import digest_of_parts
from epdctl.worker.transfer.ec_file import (
    FILE_NAME,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    StoredItem,
    check_identifier,
    header_of,
    rows_in,
)

WORK_FOLDER = ".epdctl"
STALE_AFTER_S = 3600.0
"""A file of another machine is taken for a left-over after this time: no write takes that long."""

_CHUNK_BYTES = 8 * 1024 * 1024
_CHECK_BYTES = 1024 * 1024
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PART = re.compile(r"(?P<machine>[0-9a-f]{16})-(?P<pid>[0-9]+)-[0-9a-f]{16}\.part")


class GivenUp(Exception):
    """The write was given up half-way, and nothing of it is left."""


class SharedFolder:
    """One folder, as one process writes to it. `machine` names this machine's process ids (16 hex digits)."""

    def __init__(self, path: Path, *, machine: str) -> None:
        self._path = path
        self._work = path / WORK_FOLDER
        self._machine = machine
        self._log = structlog.get_logger()

    def open(self) -> None:
        """Remove what killed processes left, and show that the folder takes files.

        Raises:
            StorageFull, StorageUnavailable: it does not.
        """
        self.probe(LENGTH_BYTES)
        for entry in list(os.scandir(self._work)):
            if self._is_left_over(entry):
                with suppress(OSError):  # another engine that starts now may be faster
                    Path(entry.path).unlink()
                    self._log.info("left_over_removed", file=entry.name)

    def probe(self, nbytes: int) -> None:
        """Show that a file of `nbytes` bytes can be made; raises what `store` raises."""
        try:
            part = self._new_part()
            try:
                with part.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise self._failure(error) from error

    def store(self, item: StoredItem, rows: memoryview, given_up: threading.Event) -> bool:
        """Put `rows` (bytes) under the item's name; return False when they were there already.

        A file that is there is read to its end where it has a digest: one that was damaged is replaced.

        Raises:
            InvalidRequest: the identifier must not become a folder's name.
            StorageFull: no space, or a quota or limit was reached.
            StorageUnavailable: the folder is gone, unwritable, or failing.
            GivenUp: `given_up` was set meanwhile.
        """
        check_identifier(item.identifier)
        place = self._path / item.identifier / FILE_NAME
        try:
            if self._holds(place, item, given_up):
                return False
            self._write(place, item, rows, given_up)
        except OSError as error:
            raise self._failure(error) from error
        return True

    def _holds(self, place: Path, item: StoredItem, given_up: threading.Event) -> bool:
        try:
            with place.open("rb", buffering=0) as file:
                head = file.read(LENGTH_BYTES + MAX_HEADER_BYTES)
                found = rows_in(item, head, os.fstat(file.fileno()).st_size)
                if found is None:
                    return False
                if found.digest is not None:
                    parts = _parts_of(file.fileno(), found.offset, given_up)
                    if digest_of_parts(parts) != found.digest:
                        self._log.warning("damaged_file_replaced", identifier=item.identifier)
                        return False
        except FileNotFoundError:
            return False
        with suppress(OSError):  # for those who clean up by age; a reader needs no new time stamp
            os.utime(place)
        return True

    def _write(self, place: Path, item: StoredItem, rows: memoryview, given_up: threading.Event) -> None:
        part = self._new_part()
        try:
            with part.open("xb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(header_of(item)), given_up)
                _write_all(file.fileno(), rows, given_up)
                os.fsync(file.fileno())
            _make_folder(place.parent)
            part.replace(place)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _new_part(self) -> Path:
        _make_folder(self._work)
        return self._work / f"{self._machine}-{os.getpid()}-{secrets.token_hex(8)}.part"

    def _is_left_over(self, entry: os.DirEntry[str]) -> bool:
        match = _PART.fullmatch(entry.name)
        if match is None:
            return False
        if match["machine"] == self._machine:
            return not _is_alive(int(match["pid"]))
        with suppress(OSError):
            return time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_AFTER_S
        return False

    def _failure(self, error: OSError) -> StorageFull | StorageUnavailable:
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        self._log.error("shared_storage_failed", folder=str(self._path), reason=reason)
        if error.errno in _FULL:
            return StorageFull(f"the shared folder for embeddings takes no more ({reason})")
        return StorageUnavailable(f"the shared folder for embeddings cannot be written ({reason})")


def this_machine() -> str:
    """Return a name for the place in which our process ids mean anything: this boot, this PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{int(boot, 16) ^ namespace:032x}"[-16:]


def _write_all(descriptor: int, data: memoryview, given_up: threading.Event) -> None:
    while data.nbytes:
        if given_up.is_set():
            raise GivenUp
        data = data[os.write(descriptor, data[:_CHUNK_BYTES]) :]


def _parts_of(descriptor: int, offset: int, given_up: threading.Event) -> Iterator[memoryview]:
    """Read a file from `offset` to its end, each part into the same memory."""
    memory = memoryview(bytearray(_CHECK_BYTES))
    while count := os.preadv(descriptor, [memory], offset):
        if given_up.is_set():
            raise GivenUp
        yield memory[:count]
        offset += count


def _make_folder(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir()


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
