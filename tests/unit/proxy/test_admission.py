"""How many requests are worked on at once, and who is next."""

from __future__ import annotations

import asyncio

import pytest

from epdctl.errors import Overloaded
from epdctl.proxy.admission import Admission

pytestmark = pytest.mark.unit


async def waiting(admission: Admission, count: int) -> list[asyncio.Task[None]]:
    """Return `count` tasks that stand in the queue."""
    tasks = [asyncio.ensure_future(admission.enter()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_a_permit_that_is_given_back_goes_to_one_waiter() -> None:
    """The first in the queue gets it, nobody else does, and the limit holds."""
    admission = Admission(limit=1, queue_size=3, wait_s=5)
    await admission.enter()
    first, second, third = await waiting(admission, 3)
    admission.leave()
    await first

    assert (second.done(), third.done(), admission.active) == (False, False, 1)
    admission.leave()
    await second
    admission.leave()
    await third
    admission.leave()
    assert admission.active == 0


async def test_a_full_queue_refuses_at_once() -> None:
    """Beyond the queue there is no waiting, and the refusal says when to come again."""
    admission = Admission(limit=1, queue_size=1, wait_s=5)
    await admission.enter()
    (task,) = await waiting(admission, 1)
    with pytest.raises(Overloaded) as caught:
        await admission.enter()

    assert caught.value.retry_after_s == 1
    task.cancel()


async def test_a_wait_that_is_too_long_ends() -> None:
    """Whoever gave up holds no place and gets no permit."""
    admission = Admission(limit=1, queue_size=1, wait_s=0.01)
    await admission.enter()
    with pytest.raises(Overloaded):
        await admission.enter()
    admission.leave()

    assert admission.active == 0


async def test_a_waiter_that_leaves_is_passed_over() -> None:
    """The permit goes to the next one that is still there."""
    admission = Admission(limit=1, queue_size=2, wait_s=5)
    await admission.enter()
    gone, stays = await waiting(admission, 2)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    admission.leave()
    await stays

    assert admission.active == 1


async def test_a_permit_that_comes_as_the_waiter_leaves_is_not_lost() -> None:
    """Granted and cancelled in the same moment: the permit goes back."""
    admission = Admission(limit=1, queue_size=2, wait_s=5)
    await admission.enter()
    (task,) = await waiting(admission, 1)
    admission.leave()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert admission.active == 0


async def test_no_limit() -> None:
    """Zero lets everybody in."""
    admission = Admission(limit=0, queue_size=0, wait_s=0)
    for _ in range(100):
        await admission.enter()

    assert admission.active == 100
