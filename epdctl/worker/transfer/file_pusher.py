"""Delivers embeddings by writing them into a shared folder: a `ports.Pusher` for clusters without Mooncake.

    pusher = FilePusher(SharedFolder(path, machine=this_machine()), observe=sink, deadline_s=8.0)
    delivery = pusher.announce(announcement)       # nobody is asked: the folder has no reservations
    result = await delivery.push(PushSource(…))    # ends when the file is there under its name
    pusher.trouble(); await pusher.close()

Rules of this file: files are written on threads of its own. A write that does not end in time fails its item;
the bytes stay with the thread until it has let go of them.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import structlog

from epdctl.errors import ShuttingDown, StorageFull, StorageUnavailable, UpstreamTimeout
from epdctl.worker.transfer.callbacks import call_back
from epdctl.worker.transfer.ec_file import StoredItem, check_identifier
from epdctl.worker.transfer.ports import (
    PushAnnouncement,
    PushItem,
    PushResult,
    PushSource,
    RecordSink,
    Side,
    TransferOutcome,
    TransferRecord,
)
from epdctl.worker.transfer.shared_folder import SharedFolder

WRITERS = 4
TROUBLED_AFTER_FAILURES = 3
PROBE_INTERVAL_S = 2.0


class FilePusher:
    """See the module. Made inside a running event loop, once the folder is open."""

    def __init__(self, folder: SharedFolder, *, observe: RecordSink, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._folder = folder
        self._observe = observe
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="shared-folder")
        self._failed_sizes: tuple[int, ...] = ()
        self._reason = ""
        self._healing: asyncio.Task[None] | None = None
        self._closed = False

    async def push(self, item: PushItem) -> PushResult:
        """Announce and deliver in one call."""
        source = PushSource(address=item.address, digest=item.digest, on_free=item.on_source_free)
        return await self.announce(item).push(source)

    def announce(self, announcement: PushAnnouncement) -> FileDelivery:
        """Return the delivery of an item; raises InvalidRequest for an identifier that is no folder name."""
        if self._closed:
            raise ShuttingDown("this worker is shutting down")
        check_identifier(announcement.mm_hash)
        return FileDelivery(self, announcement)

    def trouble(self) -> str | None:
        """Return why the folder cannot be relied on now, or None."""
        return self._reason if self._troubling_size() is not None else None

    async def close(self) -> None:
        """Take nothing new. What is being written ends, or is given up by whoever waits for it."""
        self._closed = True
        if self._healing is not None:
            self._healing.cancel()
            await asyncio.gather(self._healing, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def write(self, item: StoredItem, source: PushSource) -> bool:
        """Write `item` on a thread; return whether it was written, False: it was there.

        Raises what `SharedFolder.store` raises, and UpstreamTimeout. `source.on_free` is called when no
        thread reads the bytes any more.
        """
        loop = asyncio.get_running_loop()
        given_up = threading.Event()
        try:
            rows = memoryview((ctypes.c_ubyte * item.nbytes).from_address(source.address)).cast("B")
            writing = loop.run_in_executor(self._threads, self._folder.store, item, rows, given_up)
        except BaseException as error:
            # No thread has the bytes, whatever went wrong.
            call_back(source.on_free)
            if isinstance(error, RuntimeError):
                raise ShuttingDown("this worker is shutting down") from error
            raise
        writing.add_done_callback(lambda done: _ended(done, source))
        try:
            async with asyncio.timeout(self.deadline_s):
                written = await asyncio.shield(writing)
        except TimeoutError as error:
            self._failed(item, "the shared folder for embeddings did not take a file in time")
            raise UpstreamTimeout("the shared folder for embeddings did not take a file in time") from error
        except (StorageFull, StorageUnavailable) as error:
            self._failed(item, error.message)
            raise
        finally:
            given_up.set()
        if written:
            self._took(item.nbytes)
        return written

    def count(self, outcome: TransferOutcome, nbytes: int, seconds: float) -> None:
        """Count one ended delivery."""
        self._observe(TransferRecord(side=Side.PRODUCER, outcome=outcome, nbytes=nbytes, seconds=seconds))

    def _failed(self, item: StoredItem, reason: str) -> None:
        self._failed_sizes = tuple(sorted((*self._failed_sizes, item.nbytes))[-TROUBLED_AFTER_FAILURES:])
        self._reason = reason
        if self.trouble() and self._healing is None and not self._closed:
            self._healing = asyncio.create_task(self._heal())

    def _took(self, nbytes: int) -> None:
        """Forget the failures that a file of `nbytes` bytes makes good: of larger ones it says nothing."""
        self._failed_sizes = tuple(size for size in self._failed_sizes if size > nbytes)

    def _troubling_size(self) -> int | None:
        """Return the size that too many files that failed have at least, or None."""
        return self._failed_sizes[0] if len(self._failed_sizes) >= TROUBLED_AFTER_FAILURES else None

    async def _heal(self) -> None:
        """Try the folder without traffic until it takes a file as large as those that failed."""
        try:
            while (nbytes := self._troubling_size()) is not None:
                await asyncio.sleep(PROBE_INTERVAL_S)
                await self._probe(nbytes)
        finally:
            self._healing = None

    async def _probe(self, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._folder.probe, nbytes)
        except (StorageFull, StorageUnavailable, RuntimeError):
            return
        except Exception:  # noqa: BLE001 - the supervisor of this loop: without it nothing heals
            structlog.get_logger().exception("shared_folder_probe_failed")
            return
        self._took(nbytes)


class FileDelivery:
    """One item on its way into the folder; implements `ports.Delivery`."""

    def __init__(self, pusher: FilePusher, announcement: PushAnnouncement) -> None:
        self._pusher = pusher
        self._announcement = announcement

    async def push(self, source: PushSource) -> PushResult:
        """Write the rows, unless the folder has them.

        Raises StorageFull, StorageUnavailable, UpstreamTimeout or ShuttingDown. A cancelled push leaves no
        unfinished file behind.
        """
        announced = self._announcement
        loop = asyncio.get_running_loop()
        begun = loop.time()
        outcome = TransferOutcome.FAILED
        nbytes = 0
        item = StoredItem(
            identifier=announced.mm_hash,
            shape=announced.shape,
            dtype=announced.dtype,
            nbytes=announced.nbytes,
            digest=source.digest,
        )
        try:
            written = await self._pusher.write(item, source)
            outcome = TransferOutcome.DELIVERED if written else TransferOutcome.CACHED
            nbytes = item.nbytes if written else 0
        except asyncio.CancelledError:
            outcome = TransferOutcome.CANCELLED
            raise
        finally:
            self._pusher.count(outcome, nbytes, loop.time() - begun)
        return PushResult(
            transfer_id=announced.transfer_id,
            outcome=outcome,
            nbytes_written=nbytes,
            seconds=loop.time() - begun,
        )

    def abort(self) -> None:
        """Nothing was reserved, so there is nothing to give back."""


def _ended(writing: asyncio.Future[bool], source: PushSource) -> None:
    """Let go of the bytes; how it ended was told to whoever still waited."""
    call_back(source.on_free)
    if not writing.cancelled():
        writing.exception()
