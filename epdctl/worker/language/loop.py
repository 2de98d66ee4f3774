"""The generation loop: takes requests up, computes step after step, sends tokens out.

Rules of this file: order of steps only; what a step holds is decided in `batch`, what it computes in
`runner`. Everything is on the event loop except the step itself, which runs on the one compute thread.
Arrivals and cancels are applied between two steps. A step that fails is repeated request by request, so that
only those fail that made it fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from epdctl.errors import EpdError, GenerationFailed, ShuttingDown
from epdctl.metrics import WorkerMetrics
from epdctl.worker.language.batch import Batch, Key, Order, Plan, Sampled
from epdctl.worker.language.kv import KvPool, KvRegion
from epdctl.worker.language.kv_messages import KvTicket
from epdctl.worker.language.messages import Token, Tokens
from epdctl.worker.language.runner import Prompt, Runner, requests_of
from epdctl.worker.language.sampling import Chosen, Sampler

STUCK_AFTER_S = 60.0


@dataclass(slots=True, kw_only=True)
class Job:
    """A request with everything it needs at hand.

    `release` is called once, when what was sent for it is not needed any more: embeddings that have been
    read, KV that will not be fetched. `token_ids` is the prompt, `ticket` says where its KV comes from.
    """

    order: Order
    prompt: Prompt
    sampler: Sampler
    release: Callable[[], None]
    token_ids: Sequence[int] = ()
    ticket: KvTicket | None = None
    open_choices: set[int] = field(default_factory=set)

    def let_go(self) -> None:
        """Call `release`, the first time only."""
        release = self.keep()
        release()

    def keep(self) -> Callable[[], None]:
        """Return `release` and see to it that it is not called from here."""
        release, self.release = self.release, _nothing
        return release


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEvents:
    """What the loop tells its owner, by call id."""

    tokens: Callable[[str, Tokens], Awaitable[None]]
    failed: Callable[[str, EpdError], Awaitable[None]]


class KvExchange(Protocol):
    """KV that comes from and goes to other processes."""

    def hold(self, request_id: str, region: KvRegion, token_ids: Sequence[int]) -> KvTicket:
        """Take a finished prompt's region over and return the ticket for it."""
        ...

    def begin(self, request_id: str, region: KvRegion, ticket: KvTicket) -> None:
        """Have a prompt's KV written to its region; `landed` or `lost` of the loop tells how it ended."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Give that up and take the region over; False when it has ended."""
        ...


class GenerationLoop:
    """One engine's requests from arrival to end."""

    def __init__(
        self,
        batch: Batch[KvRegion],
        runner: Runner,
        pool: KvPool,
        thread: Executor,
        *,
        events: LoopEvents,
        metrics: WorkerMetrics,
        exchange: KvExchange | None = None,
    ) -> None:
        self._batch = batch
        self._runner = runner
        self._pool = pool
        self._thread = thread
        self._events = events
        self._metrics = metrics
        self._exchange = exchange
        self._arrivals: list[Job] = []
        self._leaving: list[tuple[str, int | None]] = []
        self._landed: list[str] = []
        self._lost: list[tuple[str, EpdError]] = []
        self._jobs: dict[str, Job] = {}
        self._wake = asyncio.Event()
        self._step = 0
        self._failures = 0
        self._began: float | None = None
        self._log = structlog.get_logger()
        self._show_gauges()

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._jobs) + len(self._arrivals)

    def submit(self, job: Job) -> None:
        """Take a request up before the next step; it is told by `failed` when it cannot be."""
        self._arrivals.append(job)
        self._wake.set()

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request, or one choice of it, before the next step; harmless when it has ended."""
        self._leaving.append((request_id, choice))
        self._wake.set()

    def landed(self, request_id: str) -> None:
        """Note that a prompt's KV is in its region."""
        self._landed.append(request_id)
        self._wake.set()

    def lost(self, request_id: str, error: EpdError) -> None:
        """Note that a prompt's KV will not come; its region has been taken over."""
        self._lost.append((request_id, error))
        self._wake.set()

    def trouble(self) -> str | None:
        """Return why no request can be served now, or None; one good step ends it."""
        if self._began is not None:
            running_s = asyncio.get_running_loop().time() - self._began
            if running_s > STUCK_AFTER_S:
                return f"an engine step has been running for {running_s:.0f} s"
        return None if self._failures < 3 else f"the last {self._failures} engine steps failed"

    async def run(self) -> None:
        """Compute for ever; cancel to end."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while await self._turn():
                pass

    async def close(self) -> None:
        """Fail what has not ended; call it when nothing arrives any more, then cancel `run`."""
        left = [*(job.order.request_id for job in self._arrivals), *self._jobs]
        for request_id in left:
            self.cancel(request_id)
            await self._events.failed(request_id, ShuttingDown("this worker is shutting down"))

    async def _turn(self) -> bool:
        """Do one step; False when there is nothing to do before something arrives."""
        await self._apply()
        plan = self._batch.plan()
        if plan is None:
            return False
        self._import(plan)
        if not plan.segments:
            return True
        done, chosen = await self._compute(plan)
        await self._deliver(self._batch.commit(done, {k: c.token for k, c in chosen.items()}), chosen)
        return True

    def _import(self, plan: Plan[KvRegion]) -> None:
        for key, region in plan.imports.items():
            job = self._jobs[key.request_id]
            assert self._exchange is not None and job.ticket is not None
            job.keep()  # from here on the exchange looks after the ticket
            self._exchange.begin(key.request_id, region, job.ticket)

    async def _apply(self) -> None:
        await self._take_up()
        await self._settle_imports()
        leaving, self._leaving = self._leaving, []
        for request_id, choice in leaving:
            if choice is None and self._exchange is not None and self._exchange.cancel(request_id):
                self._batch.detach(request_id)
            else:
                self._batch.cancel(request_id, choice)
            self._close(request_id, choice)

    async def _settle_imports(self) -> None:
        landed, self._landed = self._landed, []
        for request_id in landed:
            self._batch.imported(request_id)
        lost, self._lost = self._lost, []
        for request_id, error in lost:
            self._batch.detach(request_id)
            self._close(request_id, None)
            await self._events.failed(request_id, error)

    async def _take_up(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for job in arrivals:
            try:
                self._batch.submit(job.order)
            except EpdError as error:
                job.let_go()
                await self._events.failed(job.order.request_id, error)
                continue
            job.open_choices = set(range(job.order.choices))
            self._jobs[job.order.request_id] = job
            self._runner.add(job.order.request_id, job.prompt, job.sampler)

    def _close(self, request_id: str, choice: int | None) -> None:
        """Note that a choice, or all, has ended; with the last one the request is forgotten."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        if choice is not None:
            job.open_choices.discard(choice)
        if choice is None or not job.open_choices:
            del self._jobs[request_id]
            self._runner.remove(request_id)
            job.let_go()

    async def _compute(self, plan: Plan[KvRegion]) -> tuple[Plan[KvRegion], dict[Key, Chosen]]:
        """Run the step; return the part of it that worked, with its tokens."""
        self._step += 1
        loop = asyncio.get_running_loop()
        self._began = began = loop.time()
        chosen = await self._attempt(plan)
        if chosen is None:
            plan, chosen = await self._attempt_each(plan)
        self._began = None
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(loop.time() - began)
        self._metrics.step_sequences.observe(len(plan.segments))
        return plan, chosen

    async def _attempt(self, plan: Plan[KvRegion]) -> dict[Key, Chosen] | None:
        loop = asyncio.get_running_loop()
        try:
            chosen = await loop.run_in_executor(self._thread, self._runner.run, plan)
        except Exception:  # noqa: BLE001 - the supervisor of this loop: a step must not end the engine
            self._failures += 1
            self._log.exception("engine_step_failed", requests=len(requests_of(plan)))
            return None
        self._failures = 0
        return chosen

    async def _attempt_each(self, plan: Plan[KvRegion]) -> tuple[Plan[KvRegion], dict[Key, Chosen]]:
        parts = requests_of(plan)
        chosen: dict[Key, Chosen] = {}
        failed: set[str] = set()
        for request_id, part in parts.items():
            outcome = await self._attempt(part) if len(parts) > 1 else None
            if outcome is None:
                failed.add(request_id)
            else:
                chosen |= outcome
        for request_id in failed:
            self._batch.cancel(request_id)
            self._close(request_id, None)
            await self._events.failed(
                request_id, GenerationFailed("the language model failed on this request")
            )
        segments = tuple(s for s in plan.segments if s.key.request_id not in failed)
        return Plan(segments=segments, imports={}, regions=plan.regions), chosen

    async def _deliver(self, sampled: list[Sampled[KvRegion]], chosen: Mapping[Key, Chosen]) -> None:
        tokens: dict[str, list[Token]] = {}
        tickets: dict[str, KvTicket] = {}
        for event in sampled:
            choice = chosen[event.key]
            token = Token(event.key.index, choice.token, event.finish, choice.logprob, choice.top)
            tokens.setdefault(event.key.request_id, []).append(token)
            if event.held is not None:
                tickets[event.key.request_id] = self._hold(event.key.request_id, event.held)
        for request_id, new in tokens.items():
            self._jobs[request_id].let_go()
            said = Tokens(self._step, tuple(new), tickets.get(request_id))
            await self._events.tokens(request_id, said)
            for token in new:
                if token.finish is not None:
                    self._close(request_id, token.choice)
        self._metrics.generated_tokens.inc(len(sampled))

    def _hold(self, request_id: str, region: KvRegion) -> KvTicket:
        assert self._exchange is not None
        return self._exchange.hold(request_id, region, self._jobs[request_id].token_ids)

    def _show_gauges(self) -> None:
        """Let the gauges read what is true when they are asked."""
        self._metrics.sequences.labels("running").set_function(lambda: self._batch.running)
        self._metrics.sequences.labels("waiting").set_function(lambda: self._batch.waiting)
        arena = self._pool.arena
        for state in arena.bytes_by_state():
            gauge = self._metrics.kv_bytes.labels(state)
            gauge.set_function(lambda state=state: arena.bytes_by_state()[state])  # type: ignore[misc]
