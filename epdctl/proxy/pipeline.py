"""The way of a request: plan, encode, prefill, decode, deliver; attempts, and the cleaning up after each.

Rules of this file:
- The order of steps and nothing else; what is sent, matched or retried is decided in the pure modules.
- Nothing reaches the client before decode has answered, so every failure up to there has a true status.
- Each attempt gives back what it holds, in every case, also when it is cancelled: leases, connections, and
  the transfers that nobody will fetch.
"""

from __future__ import annotations

import asyncio

from epdctl.domain import InstanceUrl, Role, Stage, Topology
from epdctl.errors import EpdError, ShuttingDown, UpstreamProtocol
from epdctl.metrics import ControlMetrics
from epdctl.proxy.delivery import ClientGone, Delivered, Delivery, delivered
from epdctl.proxy.ec_cancel import EcCanceller
from epdctl.proxy.encode_stage import EncodeStage
from epdctl.proxy.job import Attempt, Job
from epdctl.proxy.kv_stage import KvStage
from epdctl.proxy.legs import DecodeLeg, Leases, Legs
from epdctl.proxy.plan import RoutePlan
from epdctl.proxy.ports import RoutingPort
from epdctl.proxy.record import ABORTED, CANCELLED, CLIENT_DISCONNECT, OK
from epdctl.proxy.retry import Circumstances, FailureKind, RetryBudget, StageFailed, is_worth_a_new_attempt
from epdctl.proxy.rewrite import NOTHING_ENCODED
from epdctl.proxy.router import Router
from epdctl.proxy.upstream import UpstreamClient

_NOBODY: frozenset[InstanceUrl] = frozenset()


class Pipeline:
    """Serves jobs for one proxy process."""

    def __init__(
        self,
        *,
        client: UpstreamClient,
        legs: Legs,
        router: Router,
        routing: RoutingPort,
        canceller: EcCanceller,
        metrics: ControlMetrics,
        kv_connector: str,
        decode_retries: int,
        idle_s: float,
    ) -> None:
        self._router = router
        self._routing = routing
        self._canceller = canceller
        self._retries = metrics.retries
        self._decode_retries = decode_retries
        self._idle_s = idle_s
        self._budget = RetryBudget()
        self._encode_stage = EncodeStage(legs, router, metrics, self._spend_retry)
        self._kv_stage = KvStage(legs, client, kv_connector)

    async def serve(self, job: Job, delivery: Delivery) -> Delivered:
        """Serve `job` to its end; raises an EpdError when nothing was delivered."""
        self._budget = self._budget.earn()
        avoid = _NOBODY
        while True:
            job.record.attempts += 1
            plan = self._router.route(job.demand(avoid))
            job.record.topology = Topology.E_PD if plan.prefill is None else Topology.E_P_D
            attempt = Attempt(plan=plan, leases=self._lease(plan))
            try:
                leg = await self._reach_decode(job, attempt)
                return await self._deliver(job, leg, delivery)
            except StageFailed as failure:
                if not self._is_retried(job, attempt, failure):
                    raise failure.error from failure
                avoid = avoid | {_blamed(failure, attempt)[1]}
            finally:
                self._clean_up(attempt)

    def _lease(self, plan: RoutePlan) -> Leases:
        leases = Leases(self._routing)
        for batch in plan.batches:
            leases.take(batch.member)
        if plan.prefill is not None:
            leases.take(plan.prefill)
        leases.take(plan.decode)
        return leases

    async def _reach_decode(self, job: Job, attempt: Attempt) -> DecodeLeg:
        encoded = NOTHING_ENCODED
        if attempt.plan.batches:
            encoded = await self._encode_stage.run(job, attempt)
        return await self._kv_stage.run(job, attempt, encoded)

    def _clean_up(self, attempt: Attempt) -> None:
        attempt.leases.close()
        consumer_zmq = attempt.plan.consumer.ec_zmq_addr
        if consumer_zmq is not None and attempt.unwanted_ids:
            self._canceller.cancel(consumer_zmq, attempt.unwanted_ids)

    def _is_retried(self, job: Job, attempt: Attempt, failure: StageFailed) -> bool:
        role, url = _blamed(failure, attempt)
        circumstances = Circumstances(
            attempt=job.record.attempts,
            decode_retries=self._decode_retries,
            has_other=self._router.has_other(role, job.request.model, url),
            has_transfer=bool(job.request.items) or attempt.plan.prefill is not None,
        )
        if not is_worth_a_new_attempt(failure, circumstances) or not self._spend_retry():
            return False
        self._retries.labels(failure.stage.value, failure.kind.value).inc()
        return True

    def _spend_retry(self) -> bool:
        left = self._budget.spend()
        if left is None:
            return False
        self._budget = left
        return True

    async def _deliver(self, job: Job, leg: DecodeLeg, delivery: Delivery) -> Delivered:
        """Give decode's answer to the client; from here on nothing is retried."""
        outcome, job.record.status = CANCELLED, leg.status
        try:
            if leg.whole is not None:
                result = await delivery.send_whole(leg.status, leg.headers, leg.whole.body)
            else:
                result = await self._relay(leg, delivery)
            outcome = job.record.outcome = OK
        except StageFailed as failure:
            outcome, result = failure.kind.value, self._fail(job, delivery, failure.error)
        except ClientGone:
            job.record.outcome = CLIENT_DISCONNECT
            delivery.cut()
            result = delivered(leg.status, lives_on=False)
        except asyncio.CancelledError:
            if delivery.is_client_there:
                self._fail(job, delivery, ShuttingDown("this proxy is shutting down"))
            raise
        except BaseException:
            delivery.cut()
            raise
        finally:
            leg.close(outcome)
        return result

    async def _relay(self, leg: DecodeLeg, delivery: Delivery) -> Delivered:
        delivery.begin_stream(leg.status, leg.headers)
        try:
            await leg.relay(delivery, idle_s=self._idle_s)
        except StageFailed:
            # Lost after [DONE]: the client has all of its answer.
            if not delivery.is_finished:
                raise
        if not delivery.is_finished:
            error = UpstreamProtocol("the decode instance ended its stream early")
            raise StageFailed(Stage.DECODE, FailureKind.PROTOCOL, error, url=leg.url)
        return delivery.end()

    def _fail(self, job: Job, delivery: Delivery, error: EpdError) -> Delivered:
        job.record.outcome = ABORTED
        job.record.error_code = error.code
        return delivery.fail(error)


def _blamed(failure: StageFailed, attempt: Attempt) -> tuple[Role, InstanceUrl]:
    """Return the role and the URL of the instance that a new attempt has to do without."""
    if failure.is_of_consumer:
        return attempt.consumer.role, attempt.consumer.url
    if failure.stage is Stage.DECODE:
        return attempt.plan.decode.role, failure.url
    return Role.PREFILL if failure.stage is Stage.PREFILL else Role.ENCODE, failure.url
