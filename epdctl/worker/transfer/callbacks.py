"""Calling what belongs to somebody else: a bug in there ends at the call.

    call_back(on_news, failed, settled)            # whoever is told next, is told all the same
    asked = call_back(ask_many, items)             # None when it raised
    guarded(break_off, step, now)                  # a step of one item, whose bug ends that item
    task = loop.create_task(watched(work, break_off))     # a task that nobody awaits

Rules of this file: the one place where whatever a callback, or a task without a reader, raises is caught. A
loop that calls back item by item owes every other item its news; one that ends others'
work is not called so. The call runs thousands of times a second: it makes no object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

import structlog

from epdctl.errors import EpdError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def call_back(call: Callable[[*Ts], T], *arguments: *Ts) -> T | None:
    """Return what `call(*arguments)` returns, or None when it raised: that is logged, with the callback."""
    try:
        return call(*arguments)
    except Exception:  # noqa: BLE001 - a bug of one callback must not become everybody's
        structlog.get_logger().exception("callback_failed", callback=_name(call))
        return None


def guarded(on_bug: Callable[[], object], call: Callable[[*Ts], object], *arguments: *Ts) -> None:
    """Call `call(*arguments)`. A bug in it ends here, in `on_bug`, which logs the exception."""
    try:
        call(*arguments)
    except Exception:  # noqa: BLE001 - a bug costs whose step this is, and nobody else
        on_bug()


async def watched(work: Callable[[], Awaitable[object]], on_bug: Callable[[], object]) -> None:
    """Await `work()`. A bug in it ends here, in `on_bug`, which logs the exception; an EpdError goes on."""
    try:
        await work()
    except EpdError:
        raise
    except Exception:  # noqa: BLE001 - the supervisor of tasks that nobody else awaits
        on_bug()


def _name(call: object) -> str:
    return getattr(call, "__qualname__", None) or repr(call)
