"""Tells EC consumers that transfers are no longer wanted; never on a request's path.

Rules of this file: one task for each consumer, however many requests end at once; all of it is bounded: ids
that wait, and the time that a batch of them may take. A consumer that does not answer frees the memory itself
when its lease is over, so a failure here is only worth a debug line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import structlog

from epdctl.domain import TransferId
from epdctl.ec.client import ControlClient
from epdctl.errors import EpdError

CANCEL_TIMEOUT_S = 2.0
_MAX_WAITING = 4096
_BATCH = 64


class EcCanceller:
    """Cancels transfers at consumers in the background."""

    def __init__(self, *, timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[str, deque[TransferId]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = structlog.get_logger()

    @property
    def busy_consumers(self) -> int:
        """How many consumers are being talked to."""
        return len(self._tasks)

    def cancel(self, consumer_zmq: str, transfer_ids: Iterable[TransferId]) -> None:
        """Give up `transfer_ids` at all ranks of the consumer at `consumer_zmq`; returns at once."""
        waiting = self._waiting.setdefault(consumer_zmq, deque(maxlen=_MAX_WAITING))
        waiting.extend(transfer_ids)
        if waiting and consumer_zmq not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._work(consumer_zmq))
            self._tasks[consumer_zmq] = task

    async def close(self) -> None:
        """Let what is under way end within its time, then give up the rest."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=self._timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, consumer_zmq: str) -> None:
        waiting = self._waiting[consumer_zmq]
        try:
            while waiting:
                batch = [waiting.popleft() for _ in range(min(_BATCH, len(waiting)))]
                await self._cancel_batch(consumer_zmq, batch)
        finally:
            del self._waiting[consumer_zmq]
            del self._tasks[consumer_zmq]

    async def _cancel_batch(self, consumer_zmq: str, batch: list[TransferId]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._tell(consumer_zmq, batch)
        except (EpdError, TimeoutError) as error:
            self._log.debug("ec_cancel_failed", transfers=len(batch), error=type(error).__name__)

    async def _tell(self, consumer_zmq: str, batch: list[TransferId]) -> None:
        first = ControlClient(consumer_zmq, self._timeout_s)
        try:
            ports = await first.peers()
        finally:
            await first.close()
        ranks = [str(first.address.with_port(port)) for port in ports]
        results = await asyncio.gather(
            *(self._tell_rank(rank, batch) for rank in ranks), return_exceptions=True
        )
        for failure in filter(None, results):
            raise failure

    async def _tell_rank(self, rank_zmq: str, batch: list[TransferId]) -> None:
        client = ControlClient(rank_zmq, self._timeout_s)
        try:
            for transfer_id in batch:
                await client.cancel(transfer_id)
        finally:
            await client.close()
