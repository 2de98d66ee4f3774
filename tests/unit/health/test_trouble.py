"""Is it them, or is it us?"""

from __future__ import annotations

import pytest

from epdctl.health.trouble import OwnTrouble

pytestmark = pytest.mark.unit

WINDOW_S = 5.0
RESULT_S = 6.0


def seen(*failures: tuple[str, str, float], success: float | None = None) -> OwnTrouble:
    """Return what was seen when `failures` and a `success` had come."""
    trouble = OwnTrouble(WINDOW_S, RESULT_S)
    if success is not None:
        trouble.note_success(success)
    for instance, host, at in failures:
        trouble.note_failure(instance, host, at)
    return trouble


@pytest.mark.parametrize(
    ("failures", "success", "suspects_us"),
    [
        ([("a", "h1", 8), ("b", "h2", 9), ("c", "h3", 10)], None, True),
        ([("a", "h1", 8), ("b", "h2", 9), ("c", "h2", 10)], None, True),
        ([("a", "h1", 8), ("b", "h1", 9), ("c", "h1", 10)], None, False),
        ([("a", "h1", 9), ("b", "h2", 10)], None, False),
        ([("a", "h1", 8), ("a", "h1", 9), ("b", "h2", 10)], None, False),
        ([("a", "h1", 4.9), ("b", "h2", 9), ("c", "h3", 10)], None, True),
        ([("a", "h1", 3.9), ("b", "h2", 9), ("c", "h3", 10)], None, False),
        ([("a", "h1", 8), ("b", "h2", 9), ("c", "h3", 10)], 4.9, True),
        ([("a", "h1", 8), ("b", "h2", 9), ("c", "h3", 10)], 5.0, False),
    ],
)
def test_who_is_suspected(
    failures: list[tuple[str, str, float]], success: float | None, suspects_us: bool
) -> None:
    """Three instances on two hosts within one window, with no success in it, point at us."""
    assert seen(*failures, success=success).begin_hold(10.0) is suspects_us


def test_a_hold_lasts_one_window_and_comes_once() -> None:
    """Evictions are held for one window, and not again while nobody succeeds."""
    trouble = seen(("a", "h1", 8), ("b", "h2", 9), ("c", "h3", 10))
    trouble.begin_hold(10.0)
    for name, at in (("a", 14), ("b", 14), ("c", 14)):
        trouble.note_failure(name, f"h-{name}", at)

    assert [trouble.holds(now) for now in (10.0, 14.9, 15.0)] == [True, True, False]
    assert trouble.begin_hold(15.0) is False


def test_a_success_lets_the_next_trouble_hold_again() -> None:
    """After somebody has answered, a new outage is a new suspicion."""
    trouble = seen(("a", "h1", 8), ("b", "h2", 9), ("c", "h3", 10))
    trouble.begin_hold(10.0)
    trouble.note_success(11.0)
    assert not trouble.holds(11.0)
    for name in "abc":
        trouble.note_failure(name, f"h-{name}", 20)

    assert trouble.begin_hold(20.0)


def test_who_has_left_is_forgotten() -> None:
    """A removed instance is no witness."""
    trouble = seen(("a", "h1", 8), ("b", "h2", 9), ("c", "h3", 10))

    trouble.forget("a")

    assert not trouble.begin_hold(10.0)
