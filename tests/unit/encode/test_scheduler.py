"""The order in which the tower takes items."""

from __future__ import annotations

import random
import time

import pytest

from epdctl.worker.encode.scheduler import BatchLimits, Scheduler

pytestmark = pytest.mark.unit


def scheduler(*tokens: int, max_tokens: int = 10, max_items: int = 4, **limits: int) -> Scheduler:
    """Return a scheduler in which items "0", "1", … of `tokens` rows have arrived."""
    built = Scheduler(BatchLimits(max_tokens=max_tokens, max_items=max_items, **limits))
    for number, rows in enumerate(tokens):
        built.add(str(number), rows)
    return built


@pytest.mark.parametrize(
    ("tokens", "batches"),
    [
        ((), [()]),
        ((3, 3, 3), [("0", "1", "2"), ()]),
        ((1, 1, 1, 1, 1), [("0", "1", "2", "3"), ("4",), ()]),
        ((6, 6, 6), [("0",), ("1",), ("2",), ()]),
        ((6, 6, 4), [("0", "2"), ("1",), ()]),
        ((99, 1), [("0",), ("1",), ()]),
        ((1, 99, 2), [("0", "2"), ("1",), ()]),
        ((10, 10), [("0",), ("1",), ()]),
    ],
    ids=[
        "nothing waits",
        "within both budgets",
        "item budget",
        "token budget",
        "a smaller one goes past",
        "over budget goes alone",
        "over budget waits for its own batch",
        "exactly the budget",
    ],
)
def test_batches(tokens: tuple[int, ...], batches: list[tuple[str, ...]]) -> None:
    """The oldest item is in every batch; others follow in order of arrival as far as the budgets allow."""
    waiting = scheduler(*tokens)

    taken = [waiting.next_batch() for _ in batches]

    assert taken == batches


def test_steady_arrivals_of_small_items_do_not_starve_a_large_one() -> None:
    """An item waits for at most as many batches as there were items before it, whatever comes after, and
    whatever the names: those that come later here sort before it."""
    waiting = scheduler()
    waiting.add("x", 8)
    waiting.add("victim", 8)
    served: list[str] = []
    for number in range(10):
        for smaller in range(3):
            waiting.add(f"small-{number}-{smaller}", 2)
        served.append("victim" if "victim" in waiting.next_batch() else "")

    assert served.index("victim") <= 1


def test_an_item_is_passed_only_so_often() -> None:
    """After `max_skips` younger items went before it, nothing younger goes before an item any more."""
    waiting = scheduler(6, 6, 6, 4, 4, 4, max_skips=1)

    batches = [waiting.next_batch() for _ in range(4)]

    assert batches == [("0", "3"), ("1",), ("2", "4"), ("5",)]


def test_batch_holds_one_forward_group() -> None:
    """A batch takes the oldest item's group; others keep their place and come next, in order of arrival."""
    waiting = scheduler(max_items=3)
    for key in ("a1", "b1", "a2", "b2", "a3", "a4"):
        waiting.add(key, 1, key[0])

    taken = [waiting.next_batch() for _ in range(4)]

    assert taken == [("a1", "a2", "a3"), ("b1", "b2"), ("a4",), ()]


def test_steady_arrivals_of_one_group_do_not_starve_another() -> None:
    """An item of a rare group is in the batch after the one that was under way when it got to the front."""
    waiting = scheduler(max_items=4)
    for number in range(6):
        waiting.add(f"common{number}", 1, "common")
    waiting.add("rare", 1, "rare")
    served: list[str] = []
    for number in range(6, 36):
        waiting.add(f"common{number}", 1, "common")
    while "rare" not in served:
        served.extend(waiting.next_batch())

    assert len(served) <= 6 + 1 + 4


def test_what_could_not_run_comes_first_again() -> None:
    """Items that were put back are at the front again, in their order."""
    waiting = scheduler(5, 5, 5)
    batch = waiting.next_batch()

    waiting.put_back([(key, 5, "") for key in batch])

    assert waiting.next_batch() == batch == ("0", "1")


def test_removed_item_is_never_taken() -> None:
    """An item that nobody wants any more is in no batch, and its tokens are not counted."""
    waiting = scheduler(4, 4)

    assert waiting.remove("0") is True
    assert waiting.remove("0") is False
    assert waiting.waiting_tokens == 4
    assert waiting.next_batch() == ("1",)
    assert waiting.waiting_tokens == 0


def test_same_arrivals_give_the_same_batches() -> None:
    """The sequence of batches is a function of the arrivals alone, and loses and repeats nothing."""
    draw = random.Random(7)
    tokens = [draw.randint(1, 20) for _ in range(300)]

    def run() -> list[tuple[str, ...]]:
        waiting = scheduler(*tokens)
        return [waiting.next_batch() for _ in range(300)]

    first = run()

    assert first == run()
    assert sorted(key for batch in first for key in batch) == sorted(str(n) for n in range(300))


@pytest.mark.parametrize("groups", [1, 2, 100])
def test_cost_of_an_item_does_not_grow_with_the_queue(groups: int) -> None:
    """At 10,000 waiting items the scheduler takes at most twice as long per item as at 100."""

    def seconds_per_item(count: int, rounds: int) -> float:
        best = float("inf")
        for _ in range(rounds):
            waiting = scheduler()
            for number in range(count):
                waiting.add(str(number), 3 + number % 7, str(number % groups))
            begun = time.perf_counter()
            for _ in range(25):
                waiting.next_batch()
            best = min(best, time.perf_counter() - begun)
        return best

    assert seconds_per_item(10_000, 9) <= 2 * seconds_per_item(100, 30)


def test_what_may_not_run_leaves_the_queue_unseen() -> None:
    """Refused items take no place in the batch, set no forward group, and go before nobody."""
    scheduler = Scheduler(BatchLimits(max_tokens=10, max_items=2, look_past=1, max_skips=1))
    for key, group in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "y"), ("e", "y")):
        scheduler.add(key, 5, group)

    assert scheduler.next_batch(lambda key, tokens: key in "cd") == ("c", "d")
    assert len(scheduler) == 1
    scheduler.put_back([("a", 5, "x"), ("b", 5, "x")])
    assert scheduler.next_batch() == ("a", "b")
    assert scheduler.next_batch() == ("e",)


def test_when_nothing_may_run_the_batch_is_empty() -> None:
    """A queue of refused items is empty afterwards, as is the batch."""
    scheduler = Scheduler(BatchLimits(max_tokens=10, max_items=2))
    for number in range(100):
        scheduler.add(str(number), 5)

    assert scheduler.next_batch(lambda key, tokens: False) == ()
    assert (len(scheduler), scheduler.waiting_tokens) == (0, 0)
