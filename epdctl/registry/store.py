"""Where dynamic registrations survive a restart: memory (nowhere) or one SQLite file.

Rules of this file:
- Static instances are never stored, they come from the command line; states are not stored either, what comes
  back is `pending` and is probed at once.
- The SQLite file is locked while it is in use: a second process is told so instead of sharing it.
- All SQLite calls run on the store's own thread, in order; a call returns when the change is in the file.
- Foreign errors become `StoreFailed`, which names the file.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from epdctl.domain import InstanceSpec, InstanceUrl, Role

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS instances (
  url TEXT PRIMARY KEY,
  position INTEGER NOT NULL,
  generation INTEGER NOT NULL,
  record BLOB NOT NULL
) STRICT, WITHOUT ROWID
"""
_VERSION = 1


class StoreFailed(Exception):
    """The store cannot be opened, read or written; the message names the file and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInstance:
    """One registration as it is kept."""

    spec: InstanceSpec
    generation: int


class RegistryStore(Protocol):
    """What the registry's driver asks of a store."""

    async def open(self) -> None:
        """Get ready; raise StoreFailed when that is not possible."""
        ...

    async def load(self) -> tuple[StoredInstance, ...]:
        """Return what is kept, in the order of registration."""
        ...

    async def save(self, instance: StoredInstance) -> None:
        """Keep `instance` in place of what was kept under its URL."""
        ...

    async def delete(self, url: InstanceUrl) -> None:
        """Keep nothing under `url` any more."""
        ...

    async def close(self) -> None:
        """Release the file; nothing may be called after it, except this once more."""
        ...


class MemoryStore:
    """Keeps nothing: registrations end with the process."""

    async def open(self) -> None:
        """Do nothing."""

    async def load(self) -> tuple[StoredInstance, ...]:
        """Return nothing."""
        return ()

    async def save(self, instance: StoredInstance) -> None:
        """Do nothing."""

    async def delete(self, url: InstanceUrl) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class _Row(msgspec.Struct, frozen=True):
    """The stored form of a spec; new fields need a default, so that older files still load."""

    role: Role
    dp_size: int = 1
    ec_zmq_addrs: tuple[str, ...] = ()
    model: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    kv_bootstrap_addr: str | None = None


def _to_row(spec: InstanceSpec) -> bytes:
    return msgspec.json.encode(
        _Row(
            role=spec.role,
            dp_size=spec.dp_size,
            ec_zmq_addrs=spec.ec_zmq_addrs,
            model=spec.model,
            labels=spec.labels,
            kv_bootstrap_addr=spec.kv_bootstrap_addr,
        )
    )


def _from_row(url: str, record: bytes) -> InstanceSpec:
    row = msgspec.json.decode(record, type=_Row)
    return InstanceSpec(
        url=InstanceUrl(url),
        role=row.role,
        dp_size=row.dp_size,
        ec_zmq_addrs=row.ec_zmq_addrs,
        model=row.model,
        labels=row.labels,
        kv_bootstrap_addr=row.kv_bootstrap_addr,
    )


class SqliteStore:
    """One SQLite file in WAL mode."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open or make the file and lock it; raise StoreFailed when that is not possible."""
        try:
            await self._run(self._open)
        except BaseException:
            await self.close()
            raise

    async def load(self) -> tuple[StoredInstance, ...]:
        """Return what is kept, in the order of registration."""
        return await self._run(self._load)

    async def save(self, instance: StoredInstance) -> None:
        """Keep `instance` in place of what was kept under its URL."""
        await self._run(lambda: self._save(instance))

    async def delete(self, url: InstanceUrl) -> None:
        """Keep nothing under `url` any more."""
        await self._run(lambda: self._execute("DELETE FROM instances WHERE url = ?", url))

    async def close(self) -> None:
        """Close the file and end the thread; may be called twice."""
        if self._connection is not None:
            await self._run(self._connection.close)
            self._connection = None
        self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except sqlite3.Error as error:
            raise StoreFailed(f"{self._path}: {_explain(error)}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreFailed(f"{self._path}: a stored record is damaged; move the file away") from error
        except OSError as error:
            raise StoreFailed(
                f"{self._path}: {error.strerror or 'cannot be opened'}; give another file with --store"
            ) from error

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._connection = connection = sqlite3.connect(
            self._path, timeout=0.5, isolation_level=None, check_same_thread=False
        )
        # Exclusive mode keeps the lock from the first transaction until the process ends, however it ends.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute(_SCHEMA)
        self._check_version(connection)
        connection.execute("COMMIT")

    def _check_version(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise StoreFailed(f"{self._path}: written by another release (format {version}); move it away")
        connection.execute(f"PRAGMA user_version = {_VERSION}")

    def _load(self) -> tuple[StoredInstance, ...]:
        rows = self._execute("SELECT url, generation, record FROM instances ORDER BY position, url")
        return tuple(
            StoredInstance(spec=_from_row(url, record), generation=generation)
            for url, generation, record in rows
        )

    def _save(self, instance: StoredInstance) -> None:
        self._execute(
            "INSERT INTO instances (url, position, generation, record) "
            "VALUES (?, (SELECT COALESCE(MAX(position), 0) + 1 FROM instances), ?, ?) "
            "ON CONFLICT (url) DO UPDATE SET generation = excluded.generation, record = excluded.record",
            instance.spec.url,
            instance.generation,
            _to_row(instance.spec),
        )

    def _execute(self, statement: str, *values: object) -> list[tuple[str, int, bytes]]:
        assert self._connection is not None
        return self._connection.execute(statement, values).fetchall()


def _explain(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text:
        return "in use by another epdctl serve; give this one another file with --store sqlite:PATH"
    if "not a database" in text or "malformed" in text:
        return "not a registry file; move it away or give another one with --store sqlite:PATH"
    return f"{text}; give another file with --store sqlite:PATH, or --store memory"


def make_store(path: Path | None) -> RegistryStore:
    """Return the store at `path`, not opened yet, or one that keeps nothing for None."""
    return MemoryStore() if path is None else SqliteStore(path)
