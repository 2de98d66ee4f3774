"""A long run through both ends in one process: nothing grows."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from pathlib import Path

import pytest

from epdctl.domain import TransferId
from epdctl.errors import TransferFailed
from epdctl.worker.transfer.notices import LeasePolicy
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.service import Verification
from tests.stubs.process import wait_until
from tests.unit.transfer.ends import MEBIBYTE, consumer_end, idle, producer_end, spec

pytestmark = [pytest.mark.unit, pytest.mark.full, pytest.mark.timeout(1200)]

ITEMS = 100_000
AT_ONCE = 50
DATA = b"rows" * 100
GROWTH_BYTES = 24 * MEBIBYTE


def rss_bytes() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_100_000_items_with_failures_leave_nothing() -> None:
    """After 100,000 pushes, a tenth of them refused, tables, arenas and memory are where they were."""

    def spoil_every_tenth(transfer_id: TransferId, view: memoryview) -> None:
        if transfer_id.endswith("7"):
            view[0] ^= 1

    leases = LeasePolicy(quarantine_s=0.5, tombstone_s=1.0)
    verification = Verification(before=spoil_every_tenth)
    async with (
        consumer_end(8 * MEBIBYTE, leases=leases, verification=verification) as consumer,
        producer_end(policy=PushPolicy(linger_s=0.5)) as producer,
    ):

        async def deliver(number: int) -> None:
            name = f"t{number}"
            item = producer.item(consumer.address, name, DATA)
            try:
                await producer.sender.push(item)
            except TransferFailed:
                return
            received = await consumer.receiver.take(
                transfer_id=TransferId(name), mm_hash=None, expect=spec(DATA), deadline_s=30
            )
            received.release()

        def remembered() -> int:
            return consumer.receiver.stats().reservations["ended"]

        warm = freed = 0
        outcomes: Counter[TransferOutcome] = Counter()
        for start in range(0, ITEMS, AT_ONCE):
            await asyncio.gather(*(deliver(number) for number in range(start, start + AT_ONCE)))
            outcomes.update(record.outcome for record in producer.records)
            freed += len(set(producer.freed))
            for grown in (producer.engine.started, producer.records, producer.freed, consumer.records):
                grown.clear()
            if start == ITEMS // 5:
                gc.collect()
                warm = rss_bytes()
        await wait_until(lambda: idle(consumer) and not remembered(), "nothing is held or remembered")
        gc.collect()

        failing = ITEMS // 10
        assert {TransferOutcome.DELIVERED: ITEMS - failing, TransferOutcome.REFUSED: failing} == outcomes
        assert freed == ITEMS
        assert (producer.sender.stats().pending, producer.sender.stats().open) == (0, 0)
        assert rss_bytes() - warm < GROWTH_BYTES
