"""The decode's end of the KV hand-over: has a prompt's KV written into a reservation, and checks it.

Rules of this file: a region whose writer may still be at work is never given back at once: it is quarantined
for as long as Mooncake may deliver late bytes. Each import ends in exactly one of: done, failed, cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from epdctl.ec.protocol import ControlAddress
from epdctl.errors import EpdError, InternalFailure, KvUndelivered
from epdctl.metrics import WorkerMetrics
from epdctl.worker.language.kv import KvPool, KvRegion, prefix_digest
from epdctl.worker.language.kv_client import KvClient, KvUnreachable
from epdctl.worker.language.kv_layout import shape_of
from epdctl.worker.language.kv_messages import Fetch, Fetched, KvTicket, RefusalCode
from epdctl.worker.language.spec import ModelSpec

QUARANTINE_S = 15.0
"""Late bytes: three times the 5 s after which Mooncake gives up a transfer that makes no progress."""

_NOT_WRITTEN = frozenset({RefusalCode.UNKNOWN, RefusalCode.BUSY, RefusalCode.INVALID})


class _Settled(Exception):
    """An import failed and nobody writes to its region any more."""

    def __init__(self, outcome: str, error: KvUndelivered) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportEvents:
    """What becomes of an import, by call id; on failure the region has been taken care of."""

    done: Callable[[str], None]
    failed: Callable[[str, EpdError], None]


class KvImporter:
    """Imports of one decode engine, written to Mooncake session `session`."""

    def __init__(
        self,
        spec: ModelSpec,
        pool: KvPool,
        session: str,
        events: ImportEvents,
        metrics: WorkerMetrics,
        *,
        wait_s: float,
    ) -> None:
        self._spec = spec
        self._pool = pool
        self._session = session
        self._events = events
        self._metrics = metrics
        self._wait_s = wait_s
        self._client = KvClient()
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")
        self._imports: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._quarantined: dict[KvRegion, asyncio.TimerHandle] = {}

    def begin(self, call_id: str, region: KvRegion, ticket: KvTicket) -> None:
        """Have the ticket's KV written to `region`, which is the importer's until the import is done."""
        task = asyncio.create_task(self._import(call_id, region, ticket))
        self._imports[call_id] = task
        task.add_done_callback(lambda ended: self._end(call_id, region, ticket, ended))

    def cancel(self, call_id: str) -> bool:
        """Give an import up; False when there is none (any more). Its region is taken care of."""
        task = self._imports.get(call_id)
        return task is not None and task.cancel()

    def give_up(self, ticket: KvTicket) -> None:
        """Tell the prefill that this KV will not be fetched."""
        release = self._client.release(_address(ticket), ticket.remote_request_id)
        task = asyncio.create_task(release)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Give everything up; the process ends."""
        tasks = [*self._imports.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._quarantined.values():
            timer.cancel()
        self._client.close()
        self._digests.shutdown(wait=True)

    def _end(self, call_id: str, region: KvRegion, ticket: KvTicket, task: asyncio.Task[None]) -> None:
        del self._imports[call_id]
        if task.cancelled():  # perhaps before its first line, so it is not up to the task to clean up
            self._count("cancelled")
            self._quarantine(region)
            self.give_up(ticket)

    async def _import(self, call_id: str, region: KvRegion, ticket: KvTicket) -> None:
        began = asyncio.get_running_loop().time()
        try:
            fetched = await self._fetch(region, ticket)
            await self._verify(region, ticket, fetched)
        except _Settled as failure:
            self._count(failure.outcome)
            self._pool.free(region)
            self._events.failed(call_id, failure.error)
        except KvUndelivered as error:
            self._count("failed")
            self._quarantine(region)
            self._events.failed(call_id, error)
        except Exception:  # noqa: BLE001 - the one supervisor of an import: it costs that one only
            structlog.get_logger().exception("kv_import_failed")
            self._count("failed")
            self._quarantine(region)
            self._events.failed(call_id, InternalFailure("a prompt's KV could not be taken over"))
        else:
            self._count("delivered", fetched.nbytes, asyncio.get_running_loop().time() - began)
            self._events.done(call_id)

    async def _fetch(self, region: KvRegion, ticket: KvTicket) -> Fetched:
        if ticket.kv_shape != shape_of(self._spec):
            self.give_up(ticket)
            reason = "prefill and decode must run the same model and dtype: their KV differs in shape"
            raise _Settled("failed", KvUndelivered(reason))
        request = Fetch(
            kv_id=ticket.remote_request_id,
            session=self._session,
            address=region.address,
            capacity=region.capacity,
        )
        try:
            answer = await self._client.fetch(_address(ticket), request, self._wait_s)
        except KvUnreachable as error:
            reason = "the prefill worker that holds the KV cannot be reached"
            raise _Settled("failed", KvUndelivered(reason)) from error
        if isinstance(answer, Fetched):
            return answer
        refused = KvUndelivered(f"the prefill worker did not hand over its KV: {answer.error}")
        if answer.code in _NOT_WRITTEN:
            raise _Settled("failed", refused)
        raise refused

    async def _verify(self, region: KvRegion, ticket: KvTicket, fetched: Fetched) -> None:
        """Compare what arrived with what was sent; raises _Settled."""
        loop = asyncio.get_running_loop()
        tokens = ticket.remote_num_tokens
        digest = await loop.run_in_executor(self._digests, prefix_digest, region, tokens)
        if digest != fetched.digest:
            reason = "the KV that arrived is not the KV that was sent (digest)"
            raise _Settled("refused", KvUndelivered(reason))

    def _quarantine(self, region: KvRegion) -> None:
        self._pool.arena.quarantine(region.place)
        loop = asyncio.get_running_loop()
        self._quarantined[region] = loop.call_later(QUARANTINE_S, self._free_late, region)

    def _free_late(self, region: KvRegion) -> None:
        del self._quarantined[region]
        self._pool.free(region)

    def _count(self, outcome: str, nbytes: int = 0, seconds: float | None = None) -> None:
        self._metrics.kv_transfers.labels("consumer", outcome).inc()
        self._metrics.kv_transfer_bytes.labels("consumer").inc(nbytes)
        if seconds is not None:
            self._metrics.kv_transfer_seconds.labels("consumer").observe(seconds)


def _address(ticket: KvTicket) -> ControlAddress:
    return ControlAddress(host=ticket.remote_host, port=ticket.remote_port)
