"""What a consumer answers on its control port: one control message in, one out.

Rules of this file: it always answers, with a reason when it refuses; items of a batch succeed or fail one by
one and keep their order. The bytes of a finished write are verified before they are published, small ones at
once, large ones on a thread, so that no other producer waits for them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import structlog
from msgspec import Raw

from epdctl.domain import TransferId
from epdctl.ec import protocol
from epdctl.ec.protocol import BadMessage, CompleteResult, Refusal, RefusalCode
from epdctl.worker.transfer.arena import Region
from epdctl.worker.transfer.digest import SMALL_BYTES, digest_of
from epdctl.worker.transfer.reservation import Reservations

MAX_BATCH_ITEMS = 4096

BeforeVerify = Callable[[TransferId, memoryview], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How finished writes are checked.

    `enabled` and `before` are for tests: the check switched off, and a look at (or a hand in) the bytes
    between the producer's write and the check.
    """

    enabled: bool = True
    before: BeforeVerify | None = None


class ControlService:
    """Answers control messages about `reservations`; `settle` is called after each that changed something."""

    def __init__(
        self,
        reservations: Reservations,
        *,
        read: Callable[[Region], memoryview],
        ports: Callable[[], tuple[int, int]],
        verification: Verification,
        executor: Executor,
        settle: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        self._reservations = reservations
        self._read = read
        self._ports = ports
        self._verification = verification
        self._executor = executor
        self._settle = settle
        self._clock = clock
        self._log = structlog.get_logger()

    async def answer(self, body: bytes) -> bytes:
        """Return the reply to one message."""
        try:
            request = protocol.parse_request(body)
            result = await self._result(request)
        except BadMessage as error:
            return protocol.encode_refusal(Refusal(str(error), RefusalCode.INVALID))
        finally:
            self._settle()
        if isinstance(result, Refusal):
            return protocol.encode_refusal(result)
        return protocol.encode_result(result)

    async def _result(self, request: protocol.Request) -> object:
        now = self._clock()
        match request:
            case protocol.Reserve():
                return self._reserve(request, now)
            case protocol.ReserveBatch():
                return {"items": [self._reserve_one(raw, now) for raw in _bounded(request.items)]}
            case protocol.Complete():
                return await self._complete(request)
            case protocol.CompleteBatch():
                return {"items": await self._complete_many(_bounded(request.items))}
            case protocol.Cancel():
                return {"cancelled": self._cancel(request, now)}
            case protocol.Status():
                return self._reservations.status(TransferId(request.transfer_id))
            case protocol.Peers():
                return {"ports": [self._ports()[0]]}
            case protocol.EventPort():
                return self._ports()[1]

    def _reserve(self, item: protocol.ReserveItem, now: float) -> protocol.Reservation | Refusal:
        return self._reservations.reserve(item, reservation_id=secrets.token_hex(16), now=now)

    def _reserve_one(self, raw: Raw, now: float) -> dict[str, object]:
        try:
            answer = self._reserve(protocol.parse_item(raw, protocol.ReserveItem), now)
        except BadMessage as error:
            answer = Refusal(str(error), RefusalCode.INVALID)
        if isinstance(answer, Refusal):
            return protocol.refusal_body(answer)
        return {"ok": True, "result": answer}

    async def _complete_many(self, items: list[Raw]) -> list[CompleteResult]:
        results = []
        for raw in items:
            try:
                results.append(await self._complete(protocol.parse_item(raw, protocol.CompleteItem)))
            except BadMessage:
                results.append(CompleteResult(completed=False, became_ready=False))
        return results

    async def _complete(self, item: protocol.CompleteItem) -> CompleteResult:
        transfer_id = TransferId(item.transfer_id)
        region = self._reservations.region_to_verify(transfer_id, item.reservation_id)
        intact = region is None or await self._is_intact(transfer_id, region, item.digest)
        # The state may have changed while the digest ran: `complete` looks again, by id and reservation.
        result = self._reservations.complete(
            transfer_id, item.reservation_id, intact=intact, now=self._clock()
        )
        if not intact:
            self._log.warning("ec_digest_mismatch", transfer_id=transfer_id, nbytes=region and region.nbytes)
        return result

    async def _is_intact(self, transfer_id: TransferId, region: Region, digest: str | None) -> bool:
        view = self._read(region)
        if self._verification.before is not None:
            self._verification.before(transfer_id, view)
        if digest is None or not self._verification.enabled:
            return True
        if region.nbytes <= SMALL_BYTES:
            return digest_of(view) == digest
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, digest_of, view) == digest

    def _cancel(self, request: protocol.Cancel, now: float) -> bool:
        return self._reservations.cancel(
            TransferId(request.transfer_id),
            request.reservation_id,
            abandon=request.abandon,
            refresh=request.refresh,
            failed=request.failed,
            fenced=request.fenced,
            now=now,
        )


def _bounded(items: list[T]) -> list[T]:
    if len(items) > MAX_BATCH_ITEMS:
        raise BadMessage(f"a batch has at most {MAX_BATCH_ITEMS} items, got {len(items)}")
    return items
