"""A limit of open files that is too low ends a start, by name and number."""

from __future__ import annotations

import resource

import pytest

from epdctl.worker.engine import StartFailed
from epdctl.worker.open_files import ENGINE, FRONT, check_open_files

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("engines", [1, 4])
def test_too_low_a_limit_is_named_with_the_cure(engines: int) -> None:
    """One descriptor less than what the start takes: the text has the limit, the need, and what to do."""
    needed = FRONT + engines * ENGINE

    with pytest.raises(StartFailed, match=f"is {needed - 1}, and the start alone needs {needed}: raise it"):
        check_open_files(engines, limit=needed - 1)


@pytest.mark.parametrize("limit", [FRONT + ENGINE, resource.RLIM_INFINITY, None])
def test_enough_starts(limit: int | None) -> None:
    """What suffices, no limit at all, and the limit of this process let the start go on."""
    check_open_files(1, limit=limit)
