"""The bytes of fetched media that a front holds together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from epdctl.errors import MediaUnavailable, Overloaded, ShuttingDown
from epdctl.worker.media_budget import MediaBudget

pytestmark = pytest.mark.unit


def test_a_request_that_is_larger_than_all_there_is_is_refused_for_good() -> None:
    """400 with the flag's name, whether others hold something or not: trying again is of no use."""
    budget = MediaBudget(100)

    with budget.share() as other, budget.share() as share:
        other.take(30)
        share.take(60)
        with pytest.raises(
            MediaUnavailable, match=r"larger together than 100 bytes \(--media-memory-bytes\)"
        ):
            share.take(41)

    assert budget.held == 0


def test_a_request_that_finds_no_room_because_of_others_may_come_again() -> None:
    """429 with Retry-After while others hold the bytes; once they let go it is taken."""
    budget = MediaBudget(100)

    with budget.share() as other, budget.share() as share:
        other.take(60)
        with pytest.raises(Overloaded, match="--media-memory-bytes") as refused:
            share.take(41)
        other.give(60)
        share.take(100)

    assert refused.value.retry_after_s == 1


def test_exactly_the_limit_is_taken() -> None:
    """The last byte of the budget may be used, and a refusal takes nothing."""
    budget = MediaBudget(100)

    with budget.share() as share:
        share.take(100)
        with pytest.raises(MediaUnavailable):
            share.take(1)
        assert budget.held == share.held == 100


def test_nothing_is_given_back_twice() -> None:
    """An item that ends after its request, or a byte too many, does not make the budget larger."""
    budget = MediaBudget(100)

    with budget.share() as other:
        other.take(10)
        with budget.share() as share:
            share.take(50)
            share.give(80)
        share.give(50)
        assert budget.held == 10


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    """All of a share goes back when its request ends with an exception."""
    budget = MediaBudget(100)

    with pytest.raises(ZeroDivisionError), budget.share() as share:
        share.take(50)
        raise ZeroDivisionError

    assert budget.held == 0


def test_what_is_still_read_for_a_request_that_ended_is_refused() -> None:
    """A thread that goes on reading after its request has ended holds nothing that nobody counts."""
    budget = MediaBudget(100)
    with budget.share() as share:
        share.take(1)

    with pytest.raises(ShuttingDown):
        share.take(1)
    assert budget.held == 0


def test_threads_lose_no_byte() -> None:
    """Many threads that take and give at once end with what they hold."""
    budget = MediaBudget(10**9)

    with budget.share() as share, ThreadPoolExecutor(4) as threads:

        def work(_: int) -> None:
            for _ in range(2000):
                share.take(3)
                share.give(2)

        list(threads.map(work, range(4)))
        assert budget.held == share.held == 4 * 2000
