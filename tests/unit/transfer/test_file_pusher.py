"""Delivering through a shared folder: what is told, what is counted, when the bytes are let go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epdctl.domain import MmHash, TransferId
from epdctl.errors import InvalidRequest, ShuttingDown, StorageFull, UpstreamTimeout
from epdctl.worker.transfer import file_pusher
from epdctl.worker.transfer.digest import digest_of
from epdctl.worker.transfer.ec_file import FILE_NAME, StoredItem
from epdctl.worker.transfer.file_pusher import FilePusher
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.ports import PushItem, TransferOutcome, TransferRecord
from epdctl.worker.transfer.shared_folder import SharedFolder
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit

NBYTES = 24


class StuckFolder:
    """A folder whose disk does what the test says: `stuck` until released, failing, or without much space."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.failure: Exception | None = None
        self.space = 1 << 20
        self.there: set[str] = set()
        self.seen: list[bytes] = []
        self.given_up: list[bool] = []
        self.probes: list[int] = []

    def store(self, item: StoredItem, rows: memoryview, given_up: threading.Event) -> bool:
        """Wait, then look at what is asked."""
        self._fail(item.nbytes)
        if item.identifier in self.there:
            return False
        self.go_on.wait(30.0)
        self.given_up.append(given_up.is_set())
        self.seen.append(bytes(rows))
        return True

    def probe(self, nbytes: int) -> None:
        """Fail like `store`."""
        self.probes.append(nbytes)
        self._fail(nbytes)

    def _fail(self, nbytes: int) -> None:
        if self.failure is not None:
            raise self.failure
        if nbytes > self.space:
            raise StorageFull("no space")


class World:
    """A pusher, its memory and what it counted."""

    def __init__(self, folder: Any, deadline_s: float = 20.0) -> None:
        self.records: list[TransferRecord] = []
        self.freed: list[str] = []
        self.memory = HostMemory(4096)
        self.memory.view(256, NBYTES)[:] = b"rows of one embedding..."
        self.pusher = FilePusher(folder, observe=self.records.append, deadline_s=deadline_s)

    def item(self, name: str = "item", nbytes: int = NBYTES) -> PushItem:
        """Return an item at offset 256."""
        return PushItem(
            consumer_zmq="",
            transfer_id=TransferId(""),
            mm_hash=MmHash(name),
            nbytes=nbytes,
            shape=(nbytes // 12, 3),
            dtype="float32",
            address=self.memory.address + 256,
            digest=digest_of(self.memory.view(256, nbytes)),
            on_source_free=lambda: self.freed.append(name),
        )

    @property
    def outcomes(self) -> list[TransferOutcome]:
        """How deliveries ended."""
        return [record.outcome for record in self.records]


@pytest.fixture
async def stuck() -> AsyncIterator[StuckFolder]:
    """Return a folder that stands still, and let its threads go at the end."""
    folder = StuckFolder()
    yield folder
    folder.go_on.set()


async def test_delivered_once_then_found(tmp_path: Path) -> None:
    """The first delivery writes the arena's bytes, the second finds them; both let go of the source."""
    folder = SharedFolder(tmp_path, machine="0" * 16)
    folder.open()
    world = World(folder)

    first = await world.pusher.push(world.item())
    second = await world.pusher.push(world.item())
    await world.pusher.close()

    assert (tmp_path / "item" / FILE_NAME).read_bytes().endswith(b"rows of one embedding...")
    assert (first.outcome, first.nbytes_written) == (TransferOutcome.DELIVERED, NBYTES)
    assert (second.outcome, second.nbytes_written) == (TransferOutcome.CACHED, 0)
    assert [(record.side.value, record.nbytes) for record in world.records] == [
        ("producer", 24),
        ("producer", 0),
    ]
    assert world.freed == ["item", "item"]
    with pytest.raises(ShuttingDown):
        world.pusher.announce(world.item())


async def test_a_name_that_is_no_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The refusal comes with the announcement."""
    world = World(SharedFolder(tmp_path, machine="0" * 16))

    with pytest.raises(InvalidRequest):
        world.pusher.announce(world.item("../x"))


async def test_a_disk_that_stands_still_fails_the_item_in_time_and_keeps_its_bytes(
    stuck: StuckFolder,
) -> None:
    """At the deadline the item fails, since the event loop never waits for a disk; the source is let go when
    the thread is done with it, and not before."""
    world = World(stuck, deadline_s=0.2)

    with pytest.raises(UpstreamTimeout):
        await world.pusher.push(world.item())
    assert world.freed == []
    assert world.outcomes == [TransferOutcome.FAILED]

    stuck.go_on.set()
    await wait_until(lambda: world.freed == ["item"], "the source was let go", 20.0)
    assert stuck.given_up == [True]
    await world.pusher.close()


async def test_a_request_that_leaves_gives_its_write_up(stuck: StuckFolder) -> None:
    """A cancelled delivery is counted as such, the thread is told, and the source is let go once."""
    world = World(stuck)
    task = asyncio.create_task(world.pusher.push(world.item()))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (world.freed, world.outcomes) == ([], [TransferOutcome.CANCELLED])

    stuck.go_on.set()
    await wait_until(lambda: world.freed == ["item"], "the source was let go", 20.0)
    assert stuck.given_up == [True]
    await world.pusher.close()


async def test_bytes_that_no_thread_takes_are_let_go(stuck: StuckFolder, monkeypatch: Any) -> None:
    """Whatever goes wrong before a thread has the bytes, their source is let go with the failure."""
    world = World(stuck)

    def refuse(*arguments: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
    with pytest.raises(ZeroDivisionError):
        await world.pusher.push(world.item())

    assert (world.freed, world.outcomes) == (["item"], [TransferOutcome.FAILED])
    monkeypatch.undo()
    await world.pusher.close()


async def test_writers_are_few_and_items_wait_for_one(stuck: StuckFolder) -> None:
    """More items than writers: all are written once the disk goes on."""
    world = World(stuck)
    tasks = [asyncio.create_task(world.pusher.push(world.item(f"i{n}"))) for n in range(12)]
    await asyncio.sleep(0.05)
    stuck.go_on.set()
    await asyncio.gather(*tasks)

    assert len(stuck.seen) == len(world.freed) == 12
    await world.pusher.close()


async def test_a_folder_that_fails_again_and_again_is_trouble_until_it_heals(
    stuck: StuckFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failures in a row are said aloud, until a probe as large as the last item goes well."""
    monkeypatch.setattr(file_pusher, "PROBE_INTERVAL_S", 0.02)
    stuck.failure = StorageFull("no space")
    world = World(stuck)
    said = []
    for _ in range(3):
        said.append(world.pusher.trouble())
        with pytest.raises(StorageFull):
            await world.pusher.push(world.item())

    assert said == [None, None, None]
    assert world.pusher.trouble() == "no space"
    await wait_until(lambda: len(stuck.probes) > 1, "the folder is probed", 20.0)
    assert world.pusher.trouble() == "no space"
    stuck.failure = ValueError("a bug")
    probed = len(stuck.probes)
    await wait_until(lambda: len(stuck.probes) > probed + 2, "a bug does not end the probing", 20.0)
    assert world.pusher.trouble() == "no space"
    stuck.failure = None
    await wait_until(lambda: world.pusher.trouble() is None, "the trouble is over", 20.0)
    assert set(stuck.probes) == {NBYTES}
    assert world.freed == ["item"] * 3
    await world.pusher.close()


@pytest.fixture
async def small(stuck: StuckFolder) -> World:
    """Return a pusher whose folder goes on at once and takes files of 100 bytes, not of more."""
    stuck.go_on.set()
    stuck.space = 100
    return World(stuck)


async def fails(world: World, *sizes: int) -> None:
    """Push items that do not fit."""
    for nbytes in sizes:
        with pytest.raises(StorageFull):
            await world.pusher.push(world.item(nbytes=nbytes))


async def test_what_says_nothing_of_the_space_does_not_heal_a_full_folder(
    stuck: StuckFolder, small: World
) -> None:
    """After three that did not fit, neither an item that was there nor a smaller file ends the trouble; one
    as large does."""
    await fails(small, 1200, 1200, 1200)
    stuck.there.add("there")
    stuck.space = 4096

    found = await small.pusher.push(small.item("there", nbytes=2400))
    assert (found.outcome, small.pusher.trouble()) == (TransferOutcome.CACHED, "no space")
    await small.pusher.push(small.item("smaller", nbytes=1188))
    assert small.pusher.trouble() == "no space"
    await small.pusher.push(small.item("as-large", nbytes=1200))
    assert small.pusher.trouble() is None
    await small.pusher.close()


async def test_small_files_between_large_ones_that_fail_do_not_hide_them(small: World) -> None:
    """A folder that takes the small files only is trouble after three large ones."""
    for _ in range(3):
        assert small.pusher.trouble() is None
        await fails(small, 1200)
        await small.pusher.push(small.item("small"))

    assert small.pusher.trouble() == "no space"
    await small.pusher.close()


async def test_a_small_failure_later_does_not_lower_what_heals(stuck: StuckFolder, small: World) -> None:
    """When small files fail as well, small files that go well again are not enough."""
    await fails(small, 1200, 1200, 1200)
    stuck.space = 0
    await fails(small, 24, 24)
    stuck.space = 100
    await small.pusher.push(small.item("small"))

    assert small.pusher.trouble() == "no space"
    await small.pusher.close()


async def test_one_huge_failure_does_not_keep_a_folder_in_trouble(
    stuck: StuckFolder, small: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder heals by a file of the size that fails again and again, not by the largest that ever did."""
    monkeypatch.setattr(file_pusher, "PROBE_INTERVAL_S", 0.02)
    stuck.space = 0
    await fails(small, 2400, 24, 48)
    assert small.pusher.trouble() == "no space"

    stuck.space = 100
    await wait_until(lambda: small.pusher.trouble() is None, "the trouble is over", 20.0)
    assert set(stuck.probes) == {24}
    await small.pusher.close()
