"""Claims about calling what belongs to somebody else."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import pytest
from structlog.testing import capture_logs

from epdctl.errors import ConsumerUnavailable
from epdctl.worker.transfer.callbacks import call_back, watched

pytestmark = pytest.mark.unit


def broken(number: int) -> int:
    """Raise, as a bug would."""
    raise RuntimeError(f"a bug with {number}")


def test_what_it_returns_is_returned() -> None:
    """A callback that works is a plain call, and nothing is logged."""
    with capture_logs() as logs:
        assert call_back(divmod, 7, 2) == (3, 1)

    assert logs == []


def test_what_it_raises_is_logged_once_and_goes_no_further() -> None:
    """One line has the callback's name and the exception; the caller goes on with None."""
    with capture_logs() as logs:
        assert call_back(broken, 7) is None

    assert logs == [
        {"event": "callback_failed", "callback": "broken", "exc_info": True, "log_level": "error"}
    ]


def test_a_callback_without_a_name_is_shown_as_it_is() -> None:
    """What is called may be a partial, and its failure is logged all the same."""
    with capture_logs() as logs:
        call_back(partial(broken, 7))

    assert "broken" in logs[0]["callback"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_order_to_end_is_no_bug(end: type[BaseException]) -> None:
    """A cancellation and the end of the process go through."""

    def stop() -> None:
        raise end

    with capture_logs() as logs, pytest.raises(end):
        call_back(stop)

    assert logs == []


async def test_a_bug_of_a_task_ends_where_it_is_watched() -> None:
    """Whoever watches is called with the exception at hand, once; a failure of ours goes on to the caller."""
    seen: list[BaseException | None] = []

    async def fail(error: Exception) -> None:
        raise error

    def on_bug() -> None:
        seen.append(sys.exc_info()[1])

    bug = RuntimeError("a bug")
    await watched(partial(fail, bug), on_bug)
    with pytest.raises(ConsumerUnavailable):
        await watched(partial(fail, ConsumerUnavailable("nobody there")), on_bug)

    assert seen == [bug]
