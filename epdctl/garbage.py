"""When Python's cyclic garbage collector looks: seldom, and never at what a process has loaded.

With its defaults (700, 10, 10) it goes through everything that lives once in some hundred requests. In the
proxy that took an eighth of the processor time of text requests, and its pauses were most of their p99; in an
engine it goes through all of torch, and the transfers of that time wait.
"""

from __future__ import annotations

import gc

PROXY = (50_000, 50, 100)
"""A request makes a few hundred objects, almost none of them in cycles."""
ENGINE = (5_000, 20, 20)
"""A failed picture may leave its arrays in a cycle (a traceback's frames): they must not wait long."""


def pause() -> None:
    """Do not look at all while a process loads: that is a fifth of the time in which torch is imported."""
    gc.disable()


def collect_seldom(thresholds: tuple[int, int, int]) -> None:
    """Take what is loaded by now out of the collector's sight, and let it look again, less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
    gc.enable()
