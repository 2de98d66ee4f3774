"""Claims about the cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from epdctl import garbage

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.parametrize("thresholds", [garbage.PROXY, garbage.ENGINE])
def test_the_collector_looks_seldom(thresholds: tuple[int, int, int]) -> None:
    """What is loaded is left alone, and it takes many objects before the collector runs."""
    garbage.pause()
    assert not gc.isenabled()

    garbage.collect_seldom(thresholds)

    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == thresholds
    assert thresholds[0] >= 5_000
