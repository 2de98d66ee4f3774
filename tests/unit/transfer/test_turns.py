"""Claims about work that is done a little in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from epdctl.worker.transfer.turns import AT_ONCE, EACH_TURN, Turns
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit


@contextmanager
def faults_of_the_loop() -> Iterator[list[dict[str, Any]]]:
    """Collect what the loop would log."""
    loop = asyncio.get_running_loop()
    faults: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    try:
        yield faults
    finally:
        loop.set_exception_handler(None)


async def test_much_work_lets_others_in_between() -> None:
    """A burst is done in order, and what else the loop has to do is not behind the whole of it."""
    turns, done = Turns(), []
    for number in range(AT_ONCE + 3 * EACH_TURN):
        turns.add(lambda number=number: done.append(number))  # type: ignore[misc]
    seen_by_others = [len(done)]
    for _ in range(4):
        await asyncio.sleep(0)
        seen_by_others.append(len(done))

    assert list(range(AT_ONCE + 3 * EACH_TURN)) == done
    assert seen_by_others == [AT_ONCE + turn * EACH_TURN for turn in (0, 1, 2, 3, 3)]


async def test_the_first_few_are_done_at_once() -> None:
    """Whoever adds little does not wait for a turn; after one that had nothing left, a few more are."""
    turns, done = Turns(), []
    turns.add(lambda: done.append(1))
    at_once = list(done)
    await asyncio.sleep(0)
    for number in range(2, AT_ONCE + 3):
        turns.add(lambda number=number: done.append(number))  # type: ignore[misc]

    assert at_once == [1]
    assert list(range(1, AT_ONCE + 2)) == done


async def test_work_that_fails_takes_nobody_with_it() -> None:
    """What comes behind it is still done, and the fault is told to the loop."""
    turns, done = Turns(), []

    def fail() -> None:
        raise RuntimeError("in the work")

    with faults_of_the_loop() as faults:
        for _ in range(AT_ONCE):
            turns.add(lambda: None)
        turns.add(fail)
        turns.add(lambda: done.append(1))
        await wait_until(lambda: done == [1], "the second is done")

    assert [str(fault["exception"]) for fault in faults] == ["in the work"]


async def test_work_that_fails_at_once_fails_whoever_adds_it() -> None:
    """It knows best what else there is to undo; the next one is not affected."""
    turns, done = Turns(), []

    def fail() -> None:
        raise RuntimeError("in the work")

    with pytest.raises(RuntimeError, match="in the work"):
        turns.add(fail)
    turns.add(lambda: done.append(1))

    assert done == [1]


async def test_nothing_is_done_after_the_end() -> None:
    """What is left when it is closed is dropped."""
    turns, done = Turns(), []
    for _ in range(AT_ONCE + 1):
        turns.add(lambda: done.append(1))
    turns.close()
    await asyncio.sleep(0)

    assert done == [1] * AT_ONCE
