"""Cancels that a consumer did not answer, kept until it does: its space must not stay taken by nobody.

    debts = Debts(ask)          # async: sends one cancel, raises EpdError when it is not answered
    debts.add(cancel); debts.wake()                     # somebody has answered something
    debts.forgive(transfer_id); debts.clear(); debts.close()

A consumer that was paused grants, when it goes on, what was asked of it before; whoever asks for the same
item then waits for a writer that gave up long ago.

Rules of this file: at most `LIMIT` are kept, and none longer than a consumer's own leases last. They are
asked one after another when the consumer has answered something, and else every `RETRY_S`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from epdctl.errors import EpdError
from epdctl.worker.transfer.callbacks import watched
from epdctl.worker.transfer.push_steps import Cancel

LIMIT = 4096
LIFETIME_S = 600.0
"""Longer than vLLM's and our own consumers keep a reservation without its writer (300 s, then 240 s)."""
RETRY_S = 5.0


class Debts:
    """What one control address is still to be told."""

    def __init__(self, ask: Callable[[Cancel], Awaitable[object]]) -> None:
        self._ask = ask
        self._owed: OrderedDict[str, tuple[Cancel, float]] = OrderedDict()
        self._answers = asyncio.Event()
        self._paying: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._owed)

    def add(self, cancel: Cancel) -> None:
        """Keep a cancel that was not answered."""
        self._owed[cancel.transfer_id] = (cancel, self._loop.time() + LIFETIME_S)
        while len(self._owed) > LIMIT:
            self._owed.popitem(last=False)
        if self._paying is None:
            self._answers.clear()
            self._paying = self._loop.create_task(self._pay())

    def wake(self) -> None:
        """The consumer answers: ask now."""
        self._answers.set()

    def forgive(self, transfer_id: str) -> None:
        """The id is in use again: a late cancel would hit that use."""
        self._owed.pop(transfer_id, None)

    def clear(self) -> None:
        """Forget all: the process that held them is gone."""
        self._owed.clear()

    def close(self) -> None:
        """Forget all and ask nothing more."""
        self._owed.clear()
        if self._paying is not None:
            self._paying.cancel()

    async def _pay(self) -> None:
        try:
            while self._owed:
                await self._pause()
                await self._pay_what_is_answered()
        finally:
            self._paying = None

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await self._answers.wait()
        except TimeoutError:
            pass
        self._answers.clear()

    async def _pay_what_is_answered(self) -> None:
        while self._owed:
            transfer_id, (cancel, until) = next(iter(self._owed.items()))
            if self._loop.time() < until:
                try:
                    # A bug costs this cancel, and not those that are owed after it.
                    log = structlog.get_logger().bind(transfer_id=transfer_id)
                    await watched(partial(self._ask, cancel), partial(log.exception, "ec_cancel_broken"))
                except EpdError:
                    return
            self._owed.pop(transfer_id, None)
