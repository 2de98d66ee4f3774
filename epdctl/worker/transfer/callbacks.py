"""Calling what belongs to somebody else: a bug in there ends at the call.

    call_back(on_news, failed, settled)            # whoever is told next, is told all the same
    asked = call_back(ask_many, items)             # None when it raised

Rules of this file: the one place where whatever a callback raises is caught, and it is logged there. A loop
that calls back item by item owes every other item its news; one that ends others' work is not called so. The
call runs thousands of times a second: it makes no object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import structlog

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def call_back(call: Callable[[*Ts], T], *arguments: *Ts) -> T | None:
    """Return what `call(*arguments)` returns, or None when it raised: that is logged, with the callback."""
    try:
        return call(*arguments)
    except Exception:  # noqa: BLE001 - a bug of one callback must not become everybody's
        structlog.get_logger().exception("callback_failed", callback=_name(call))
        return None


def _name(call: object) -> str:
    return getattr(call, "__qualname__", None) or repr(call)
