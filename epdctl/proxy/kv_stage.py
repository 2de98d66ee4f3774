"""Prefill and decode of an attempt, in the order that the KV connector wants.

Rules of this file: decode's answer is the result; until it is returned, whatever fails or is cancelled takes
the other leg along.
"""

from __future__ import annotations

import asyncio
import secrets

from epdctl.domain import InstanceUrl, Stage
from epdctl.errors import UpstreamProtocol
from epdctl.proxy.connection import CallFailed
from epdctl.proxy.job import Attempt, Job
from epdctl.proxy.kv_handoff import (
    MOONCAKE,
    TRANSFER_PREFIX,
    KvHandoff,
    MooncakeHandoff,
    NixlHandoff,
    connector_of,
    read_engine_id,
)
from epdctl.proxy.legs import DecodeLeg, Legs, error_of_failure
from epdctl.proxy.record import CANCELLED
from epdctl.proxy.retry import FailureKind, StageFailed
from epdctl.proxy.rewrite import Encoded, build_decode_body, build_prefill_body, build_whole_body
from epdctl.proxy.upstream import Call, UpstreamClient
from epdctl.registry.snapshot import Member

_BOOTSTRAP_TIMEOUT_S = 5.0
_MAX_ENGINES = 4096


class KvStage:
    """Runs prefill (where there is one) and opens decode; `kv_connector` is the default connector."""

    def __init__(self, legs: Legs, client: UpstreamClient, kv_connector: str) -> None:
        self._legs = legs
        self._client = client
        self._kv_connector = kv_connector
        self._engine_ids: dict[tuple[InstanceUrl, int, int], str] = {}

    async def run(self, job: Job, attempt: Attempt, encoded: Encoded) -> DecodeLeg:
        """Return decode's answer; raises StageFailed."""
        prefill = attempt.plan.prefill
        if prefill is None:
            return await self._decode(job, attempt, encoded, None)
        handoff = await self._handoff(attempt, prefill)
        if handoff.is_concurrent:
            return await self._both(job, attempt, encoded, prefill, handoff)
        reply = await self._prefill(job, attempt, encoded, prefill, handoff)
        try:
            params = handoff.decode_params(reply)
        except UpstreamProtocol as error:
            raise StageFailed(Stage.PREFILL, FailureKind.PROTOCOL, error, url=prefill.url) from error
        return await self._decode(job, attempt, encoded, params)

    async def _prefill(
        self, job: Job, attempt: Attempt, encoded: Encoded, prefill: Member, handoff: KvHandoff
    ) -> bytes:
        body = build_prefill_body(job.request, encoded, handoff.prefill_params())
        headers = job.leg_headers(job.request_id, attempt.consumer_rank)
        call = Call(path=job.path, body=body, headers=headers)
        try:
            return (await self._legs.ask(Stage.PREFILL, prefill, call, job.record)).body
        finally:
            attempt.leases.give_back(prefill)

    async def _decode(
        self, job: Job, attempt: Attempt, encoded: Encoded, kv_params: bytes | None
    ) -> DecodeLeg:
        is_split = attempt.plan.prefill is not None
        if is_split and kv_params is None:
            # Nothing was handed over (a first token that ends the answer, or no connector at prefill), and a
            # metadata-only part would end an engine that holds no embedding: decode gets the whole request.
            body = build_whole_body(job.request, job.uuids)
        else:
            body = build_decode_body(job.request, encoded, kv_params)
        rank = None if is_split else attempt.consumer_rank
        call = Call(path=job.path, body=body, headers=job.leg_headers(job.request_id, rank))
        leg = await self._legs.open_decode(attempt.plan.decode, call, job.record)
        attempt.is_decode_open = True
        return leg

    async def _both(
        self, job: Job, attempt: Attempt, encoded: Encoded, prefill: Member, handoff: KvHandoff
    ) -> DecodeLeg:
        """Run both legs at once; decode's answer counts once prefill has succeeded too."""
        first = asyncio.ensure_future(self._prefill(job, attempt, encoded, prefill, handoff))
        second = asyncio.ensure_future(self._decode(job, attempt, encoded, handoff.decode_params(None)))
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_EXCEPTION)
            if first.done():
                first.result()
            if second.done():
                second.result()
            return second.result()
        except BaseException:
            await _give_up(first, second)
            self._forget_engine(prefill)
            raise

    async def _handoff(self, attempt: Attempt, prefill: Member) -> KvHandoff:
        if connector_of(prefill, attempt.plan.decode, self._kv_connector) != MOONCAKE:
            return NixlHandoff()
        if prefill.kv_bootstrap_addr is None:
            error = UpstreamProtocol(
                "the prefill instance was registered without kv_bootstrap_addr, which the mooncake KV "
                "connector needs"
            )
            raise StageFailed(Stage.PREFILL, FailureKind.PROTOCOL, error, url=prefill.url)
        rank = attempt.plan.consumer.rank
        return MooncakeHandoff(
            transfer_id=TRANSFER_PREFIX + secrets.token_hex(16),
            engine_id=await self._engine_id(prefill, prefill.kv_bootstrap_addr, rank),
            bootstrap_addr=prefill.kv_bootstrap_addr,
        )

    async def _engine_id(self, prefill: Member, address: str, rank: int) -> str:
        """Return the id of the engine behind `address`, asked once per generation of the instance."""
        key = (prefill.url, prefill.generation, rank)
        if key in self._engine_ids:
            return self._engine_ids[key]
        call = Call(path="/query", method="GET")
        try:
            answer = await self._client.call(InstanceUrl(address), call, timeout_s=_BOOTSTRAP_TIMEOUT_S)
            engine_id = read_engine_id(answer.body, rank)
        except CallFailed as failure:
            error = error_of_failure(Stage.PREFILL, failure.kind)
            raise StageFailed(Stage.PREFILL, failure.kind, error, url=prefill.url) from failure
        except UpstreamProtocol as error:
            raise StageFailed(Stage.PREFILL, FailureKind.PROTOCOL, error, url=prefill.url) from error
        if len(self._engine_ids) >= _MAX_ENGINES:
            self._engine_ids.clear()
        self._engine_ids[key] = engine_id
        return engine_id

    def _forget_engine(self, prefill: Member) -> None:
        """Ask again next time: an engine that restarted behind the same URL has another id."""
        for key in [key for key in self._engine_ids if key[0] == prefill.url]:
            del self._engine_ids[key]


async def _give_up(first: asyncio.Task[bytes], second: asyncio.Task[DecodeLeg]) -> None:
    """Cancel both legs and close a decode that had answered already."""
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    if not second.cancelled() and second.exception() is None:
        second.result().close(CANCELLED)
