"""The front's way to run the items of a request side by side."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from epdctl.errors import UnsupportedMedia
from epdctl.worker.encode.front import together

pytestmark = [pytest.mark.unit, pytest.mark.worker]


class Content:
    """Stands for an item's bytes: something whose end can be seen."""


async def test_results_come_in_order() -> None:
    """However long each takes, results stand where their works stood."""

    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await together([after(5), after(0), after(2)]) == [5, 0, 2]
    assert await together([]) == []


async def test_a_failure_holds_nothing_of_the_others() -> None:
    """What the other items had fetched goes with the request, though its failure is still looked at: not when
    the collector comes by."""
    fetched: list[weakref.ref[Content]] = []

    async def fetch() -> Content:
        content = Content()
        fetched.append(weakref.ref(content))
        return content

    async def fail() -> Content:
        await asyncio.sleep(0)
        raise UnsupportedMedia("no picture")

    gc.disable()
    try:
        with pytest.raises(UnsupportedMedia) as failure:
            await together([fetch(), fail(), fetch()])
        assert [content() for content in fetched] == [None, None]
        assert failure.value.message == "no picture"
    finally:
        gc.enable()
