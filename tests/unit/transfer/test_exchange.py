"""Our producer and our consumer against each other, over a network that loses, doubles and reorders."""

from __future__ import annotations

from collections import Counter

import pytest

from epdctl.worker.transfer.ports import TransferOutcome
from tests.unit.transfer.exchange import World, check_ended, outcomes
from tests.unit.transfer.exchange_sides import Faults

pytestmark = pytest.mark.unit


def run(seeds: range, faults: Faults, arena_bytes: int = 4096) -> Counter[TransferOutcome]:
    """Run one exchange for each seed and return how the pushes ended."""
    seen: Counter[TransferOutcome] = Counter()
    for seed in seeds:
        world = World(seed, faults, arena_bytes=arena_bytes)
        try:
            world.run()
            check_ended(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(outcomes(world))
    return seen


def test_every_transfer_ends_and_nothing_is_left() -> None:
    """In 500 random exchanges no reservation stays open, no source is released early, all transfers end."""
    seen = run(range(500), Faults())

    assert set(TransferOutcome) == set(seen)


@pytest.mark.full
def test_every_transfer_ends_and_nothing_is_left_in_10_000_exchanges() -> None:
    """The same in 10,000 random exchanges."""
    seen = run(range(500, 10_500), Faults())

    assert set(TransferOutcome) == set(seen)


def test_without_faults_everything_arrives() -> None:
    """When nothing goes wrong every item is delivered, was there already, or was taken from elsewhere."""
    nothing = Faults(
        lost=0,
        doubled=0,
        late=0,
        write_fails=0,
        corrupt=0,
        proxy_cancels=0,
        aborts=0,
        consumer_restarts=0,
        producer_restarts=0,
        source_delays=(0.0, 0.5),
    )

    seen = run(range(200), nothing, arena_bytes=1 << 16)

    assert {TransferOutcome.DELIVERED, TransferOutcome.CACHED, TransferOutcome.CANCELLED} == set(seen)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(lost=0.4),
        Faults(doubled=0.5, late=0.3),
        Faults(write_fails=0.9),
        Faults(corrupt=0.5),
        Faults(proxy_cancels=0.9, aborts=0.5),
        Faults(consumer_restarts=4, producer_restarts=0),
    ],
    ids=["lossy", "doubling", "failing-writes", "corrupting", "cancelling", "restarting"],
)
def test_one_fault_much_of_the_time(faults: Faults) -> None:
    """Each kind of fault by itself, far beyond what is normal, leaves nothing behind either."""
    run(range(100), faults)
