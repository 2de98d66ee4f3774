"""Asks the encoders for a request's items: all calls at once, and those that fail once more, elsewhere.

Rules of this file: a call that fails costs only its own items a second try, on another encoder and under new
transfer ids; the first failure that stays ends the stage and cancels the other calls.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from epdctl.domain import Role, Stage
from epdctl.errors import NoInstance, UpstreamProtocol
from epdctl.metrics import ControlMetrics
from epdctl.proxy.encode_reply import EncodeReport, read_encode_reply
from epdctl.proxy.encode_request import build_encode_body
from epdctl.proxy.job import Attempt, Job
from epdctl.proxy.legs import Legs
from epdctl.proxy.plan import EncodeBatch
from epdctl.proxy.retry import FailureKind, StageFailed, is_worth_another_encoder
from epdctl.proxy.rewrite import Encoded, gather_reports
from epdctl.proxy.router import Router
from epdctl.proxy.upstream import Call

T = TypeVar("T")


class EncodeStage:
    """The encode stage of one proxy; `may_retry` takes one retry out of the budget, or refuses."""

    def __init__(
        self, legs: Legs, router: Router, metrics: ControlMetrics, may_retry: Callable[[], bool]
    ) -> None:
        self._legs = legs
        self._router = router
        self._retries = metrics.retries
        self._may_retry = may_retry

    async def run(self, job: Job, attempt: Attempt) -> Encoded:
        """Return what the encoders report about all items of `job`; raises StageFailed."""
        attempt.mint_transfer_ids(job.request.items)
        reports = await run_together([self._encode(job, attempt, batch) for batch in attempt.plan.batches])
        flat = [report for several in reports for report in several]
        return gather_reports(flat, attempt.transfer_ids, job.uuids)

    async def _encode(self, job: Job, attempt: Attempt, batch: EncodeBatch) -> list[EncodeReport]:
        try:
            return [await self._ask(job, attempt, batch)]
        except StageFailed as failure:
            others = self._elsewhere(job, attempt, batch, failure)
            if not others:
                raise
        return await run_together([self._ask(job, attempt, other) for other in others])

    def _elsewhere(
        self, job: Job, attempt: Attempt, batch: EncodeBatch, failure: StageFailed
    ) -> tuple[EncodeBatch, ...]:
        """Return the calls that replace a failed one; none when a second try is not worth it."""
        url, model, consumer = batch.member.url, job.request.model, attempt.consumer
        is_worth = is_worth_another_encoder(
            failure,
            has_other=self._router.has_other(Role.ENCODE, model, url),
            has_other_consumer=self._router.has_other(consumer.role, model, consumer.url),
        )
        if not is_worth or not self._may_retry():
            return ()
        items = [job.request.items[index] for index in batch.items]
        try:
            others = self._router.reroute_items(job.demand(frozenset({url}), items), consumer)
        except NoInstance:
            return ()
        if any(other.member.url == url for other in others):
            return ()
        self._retries.labels(Stage.ENCODE.value, failure.kind.value).inc()
        attempt.abandoned_ids.extend(id_ for item in items for id_ in attempt.transfer_ids[item.index])
        attempt.mint_transfer_ids(items)
        for other in others:
            attempt.leases.take(other.member)
        return others

    async def _ask(self, job: Job, attempt: Attempt, batch: EncodeBatch) -> EncodeReport:
        items = [job.request.items[index] for index in batch.items]
        consumer_zmq = attempt.plan.consumer.ec_zmq_addr
        body = build_encode_body(
            job.request,
            items,
            uuids=job.uuids,
            transfer_ids=attempt.transfer_ids,
            consumer_zmq=consumer_zmq,
        )
        attempt.asked_ids.extend(id_ for item in items for id_ in attempt.transfer_ids[item.index])
        child_id = f"{job.request_id}:{items[0].index}:{secrets.token_hex(3)}"
        call = Call(path="/v1/chat/completions", body=body, headers=job.leg_headers(child_id))
        try:
            answer = await self._legs.ask(Stage.ENCODE, batch.member, call, job.record)
        finally:
            attempt.leases.give_back(batch.member)
        try:
            return read_encode_reply(
                answer.body,
                items,
                uuids=job.uuids,
                transfer_ids=attempt.transfer_ids,
                is_pushed=consumer_zmq is not None,
            )
        except UpstreamProtocol as error:
            raise StageFailed(
                Stage.ENCODE, FailureKind.PROTOCOL, error, url=batch.member.url, status=answer.status
            ) from error


async def run_together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of `calls` in order; the first failure cancels the others and leaves at once."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
