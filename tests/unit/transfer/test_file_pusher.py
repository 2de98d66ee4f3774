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
    """A folder whose disk does what the test says: `stuck` until released, or `full`."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.failure: Exception | None = None
        self.seen: list[bytes] = []
        self.given_up: list[bool] = []
        self.probes: list[int] = []

    def store(self, item: StoredItem, rows: memoryview, given_up: threading.Event) -> bool:
        """Wait, then look at what is asked."""
        if self.failure is not None:
            raise self.failure
        self.go_on.wait(30.0)
        self.given_up.append(given_up.is_set())
        self.seen.append(bytes(rows))
        return True

    def probe(self, nbytes: int) -> None:
        """Fail like `store`."""
        self.probes.append(nbytes)
        if self.failure is not None:
            raise self.failure


class World:
    """A pusher, its memory and what it counted."""

    def __init__(self, folder: Any, deadline_s: float = 20.0) -> None:
        self.records: list[TransferRecord] = []
        self.freed: list[str] = []
        self.memory = HostMemory(4096)
        self.memory.view(256, NBYTES)[:] = b"rows of one embedding..."
        self.pusher = FilePusher(folder, observe=self.records.append, deadline_s=deadline_s)

    def item(self, name: str = "item") -> PushItem:
        """Return an item at offset 256."""
        return PushItem(
            consumer_zmq="",
            transfer_id=TransferId(""),
            mm_hash=MmHash(name),
            nbytes=NBYTES,
            shape=(2, 3),
            dtype="float32",
            address=self.memory.address + 256,
            digest=digest_of(self.memory.view(256, NBYTES)),
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
