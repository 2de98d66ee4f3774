"""Where registrations survive a restart."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from epdctl.domain import InstanceSpec, Role
from epdctl.registry.store import MemoryStore, SqliteStore, StoredInstance, StoreFailed, make_store
from tests.unit.registry.build import E1, E2, P1, spec

pytestmark = pytest.mark.unit

FULL = InstanceSpec(
    url=P1,
    role=Role.PREFILL,
    dp_size=2,
    ec_zmq_addrs=("tcp://p1:1", "tcp://p1:2"),
    model="m",
    labels=(("group", "a"),),
    kv_bootstrap_addr="http://p1:9",
)


def kept(instance: InstanceSpec, generation: int = 1) -> StoredInstance:
    """Return `instance` as it is kept."""
    return StoredInstance(spec=instance, generation=generation)


async def opened(path: Path) -> SqliteStore:
    """Return an open store."""
    store = SqliteStore(path)
    await store.open()
    return store


async def test_everything_comes_back_in_order(tmp_path: Path) -> None:
    """What was saved is loaded by the next process, field by field, in the order of registration."""
    store = await opened(tmp_path / "deep" / "r.db")
    for instance in (kept(spec(E2)), kept(FULL, 3), kept(spec(E1))):
        await store.save(instance)
    await store.close()

    again = await opened(tmp_path / "deep" / "r.db")
    try:
        assert await again.load() == (kept(spec(E2)), kept(FULL, 3), kept(spec(E1)))
    finally:
        await again.close()


async def test_saving_again_replaces_and_keeps_the_place(tmp_path: Path) -> None:
    """A changed record takes the place of the old one."""
    store = await opened(tmp_path / "r.db")
    try:
        await store.save(kept(spec(E1)))
        await store.save(kept(spec(E2)))
        await store.save(kept(spec(E1, model="new"), 2))

        assert await store.load() == (kept(spec(E1, model="new"), 2), kept(spec(E2)))
    finally:
        await store.close()


async def test_deleted_is_gone(tmp_path: Path) -> None:
    """A removed instance does not come back, and removing it twice is no failure."""
    store = await opened(tmp_path / "r.db")
    try:
        await store.save(kept(spec(E1)))
        await store.delete(E1)
        await store.delete(E1)

        assert await store.load() == ()
    finally:
        await store.close()


async def test_a_second_process_is_told_that_the_file_is_in_use(tmp_path: Path) -> None:
    """Two proxies cannot share one file by mistake: the second names it and the flag."""
    first = await opened(tmp_path / "r.db")
    try:
        with pytest.raises(StoreFailed, match=r"r\.db: in use by another epdctl serve.*--store"):
            await SqliteStore(tmp_path / "r.db").open()
    finally:
        await first.close()


async def test_the_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    """A process that was killed leaves its registrations, and no lock."""
    script = (
        "import asyncio, os, signal\n"
        "from pathlib import Path\n"
        "from epdctl.registry.store import SqliteStore, StoredInstance\n"
        "from epdctl.domain import InstanceSpec, InstanceUrl, Role\n"
        "async def main():\n"
        f"    store = SqliteStore(Path({str(tmp_path / 'r.db')!r}))\n"
        "    await store.open()\n"
        "    spec = InstanceSpec(url=InstanceUrl('http://e1:8001'), role=Role.ENCODE)\n"
        "    await store.save(StoredInstance(spec=spec, generation=1))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    import sys

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await asyncio.wait_for(process.wait(), 30) == -9

    store = await opened(tmp_path / "r.db")
    try:
        assert await store.load() == (kept(spec(E1)),)
    finally:
        await store.close()


async def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A file that is no registry is left alone and named."""
    path = tmp_path / "r.db"
    path.write_bytes(b"not a database at all" * 100)

    with pytest.raises(StoreFailed, match=r"r\.db: not a registry file"):
        await SqliteStore(path).open()

    assert path.read_bytes().startswith(b"not a database")


async def test_a_file_of_another_release_is_refused(tmp_path: Path) -> None:
    """A format that this release does not know is refused instead of being read wrongly."""
    with sqlite3.connect(tmp_path / "r.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(StoreFailed, match="format 99"):
        await SqliteStore(tmp_path / "r.db").open()


async def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    """A record that cannot be read stops the start-up with the file's name."""
    store = await opened(tmp_path / "r.db")
    await store.save(kept(spec(E1)))
    await store.close()
    with sqlite3.connect(tmp_path / "r.db") as connection:
        connection.execute("UPDATE instances SET record = x'00'")
    connection.close()

    again = await opened(tmp_path / "r.db")
    try:
        with pytest.raises(StoreFailed, match=r"r\.db: a stored record is damaged"):
            await again.load()
    finally:
        await again.close()


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A path under a file is refused with its name."""
    (tmp_path / "file").write_text("x")

    with pytest.raises(StoreFailed, match=r"file/r\.db"):
        await SqliteStore(tmp_path / "file" / "r.db").open()


async def test_memory_keeps_nothing() -> None:
    """Without a path, registrations end with the process."""
    store = make_store(None)
    assert isinstance(store, MemoryStore)
    await store.open()
    await store.save(kept(spec(E1)))
    await store.delete(E1)

    assert await store.load() == ()
    await store.close()
