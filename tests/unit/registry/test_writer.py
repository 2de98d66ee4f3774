"""The task that writes the store: whoever waits for it hears how it went."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from epdctl.domain import InstanceUrl
from epdctl.registry.store import StoreFailed
from epdctl.registry.writer import StoreWriter

pytestmark = pytest.mark.unit

URL = InstanceUrl("http://127.0.0.1:1")


class BrokenStore:
    """Fails in a given way, until it has none left."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    async def delete(self, url: InstanceUrl) -> None:
        """Fail, or do nothing."""
        if self.failures:
            raise self.failures.pop(0)


@pytest.mark.parametrize("failure", [StoreFailed("no space"), RuntimeError("a bug")])
async def test_a_failed_write_is_told_and_does_not_end_the_writing(failure: Exception) -> None:
    """Known or not: it is logged, who waits hears False, and the next write is made."""
    store: Any = BrokenStore(failure)
    writer = StoreWriter(store, lambda url: None)
    writer.start()

    with capture_logs() as logs:
        async with asyncio.timeout(5):
            writer.note(URL)
            first = await writer.written(URL)
            writer.note(URL)
            second = await writer.written(URL)
    await writer.close()

    assert (first, second) == (False, True)
    assert [line["event"] for line in logs] == ["store_failed"]
