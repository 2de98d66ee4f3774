"""The encode engine process: who asks for what, who gets pixels, who gets the embedding.

Life of an item: `encode` arrives -> cache hit: delivered at once / under way: waits / in a lower tier of
the cache: brought to the arena / else its front is asked for pixels -> `pixels` arrive: queued for the
tower -> encoded and cached -> delivered to every call that waits.

Rules of this file: order of steps only; who waits for what is in `flights`, what runs next in `scheduler`,
what stays in `cache`, who waits aside for a silent consumer in `standby`. The tower runs on one thread;
everything else is on the event loop, so no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from epdctl.errors import EngineUnavailable, EpdError, Overloaded, ShuttingDown
from epdctl.worker.channel import Message, error_message, message
from epdctl.worker.encode.acceleration import accelerate
from epdctl.worker.encode.arena_memory import ArenaMemory, HostArena
from epdctl.worker.encode.cache import Entry
from epdctl.worker.encode.checkpoint import checkpoint_identity
from epdctl.worker.encode.deliveries import Deliveries, DeliveryPolicy, refusal
from epdctl.worker.encode.device_arena import DeviceArena
from epdctl.worker.encode.flights import Action, AskForPixels, Flights
from epdctl.worker.encode.messages import Ask, EncodeEngineSettings, Pixels, ReadyFacts
from epdctl.worker.encode.parking import Parking
from epdctl.worker.encode.scheduler import BatchLimits, Scheduler
from epdctl.worker.encode.standby import Standby, StandbyEvents, StandbyPolicy
from epdctl.worker.encode.store import StoredValue
from epdctl.worker.encode.tier_stack import StackEvents, TierStack
from epdctl.worker.encode.tower_queue import QueueEvents, TowerQueue
from epdctl.worker.encode.transfer import open_transfer
from epdctl.worker.encode.vision import Tower
from epdctl.worker.engine import EngineContext, StartFailed, run_engine
from epdctl.worker.transfer.arena import Arena
from epdctl.worker.transfer.memory import HostMemory

_DRAIN_POLL_S = 0.02


class EncodeEngine:
    """See the module."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._metrics = context.metrics
        self._settings = msgspec.convert(context.settings, EncodeEngineSettings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._flights = Flights(self._settings.max_asked)
        self._asks: dict[str, Ask] = {}
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._log = structlog.get_logger()

    async def start(self) -> Mapping[str, Any]:
        """Load the tower, run it once, register the arena with Mooncake; raises StartFailed."""
        self._tower = await asyncio.get_running_loop().run_in_executor(self._thread, self.load_tower)
        await self._accelerate()
        self._memory = self.open_memory(self._tower)
        self._arena = Arena(self._settings.cache_bytes)
        events = StackEvents(found=self._looked_up, fits=self._is_ours, room=self._wake)
        self._tiers = TierStack(self._settings, self._memory, self._arena, self._metrics, events)
        self._cache = self._tiers.cache
        self._transfer = await open_transfer(self._settings, self._memory, self._metrics)
        self._parking = Parking(self._settings.cache_bytes)
        self._standby = self._new_standby()
        self._deliveries = self._new_deliveries()
        self._queue = self._new_queue()
        self._show_gauges()
        await self._tiers.start()
        begin = self._context.begin
        self._tasks = [begin(self._queue.run(), "tower queue"), begin(self._send_outbox(), "outbox")]
        self._log.info("tower_ready", device=self._settings.device)
        return msgspec.structs.asdict(self._facts())

    def load_tower(self) -> Tower:
        """Return the loaded tower (on the compute thread)."""
        settings = self._settings
        folder = Path(settings.folder)
        return Tower.load(folder, dtype=settings.dtype, device=settings.device, threads=settings.threads)

    def open_memory(self, tower: Tower) -> ArenaMemory:
        """Return the memory under the cache, where the settings want it; raises StartFailed."""
        nbytes = self._settings.cache_bytes
        if self._settings.arena == "device":
            on_device = DeviceArena(tower.device, nbytes)
            self._log.info("arena_ready", arena="device", device=str(tower.device))
            return on_device
        try:
            memory = HostArena(HostMemory(nbytes))
        except (OSError, OverflowError) as error:
            raise StartFailed(f"--cache-bytes {nbytes}: the system does not give that much memory") from error
        pinned = tower.pin(memory.address, memory.nbytes)
        self._log.info("arena_ready", arena="host", pinned=pinned)
        return memory

    async def _accelerate(self) -> None:
        if not self._settings.compile:
            return
        compiler = await asyncio.get_running_loop().run_in_executor(self._thread, accelerate, self._tower)
        self._metrics.tower_graphs.set_function(lambda: compiler.graphs)
        self._log.info("tower_compiled", graphs=compiler.graphs)

    def _new_standby(self) -> Standby:
        events = StandbyEvents(
            consumers_of=self._consumers_of,
            unpark=self._unpark,
            fail=self._fail_waiting,
            ask_again=self._ask,
            admit=self._admit,
            waiting=self._waiting_aside,
            is_waiting=self._asks.__contains__,
            give_up=self._give_up,
        )
        fails = self._settings.reply_after == "push"
        policy = StandbyPolicy(timeout_s=self._settings.transfer_timeout_s, fails=fails)
        return Standby(self._parking, self._transfer, events, policy)

    def _new_deliveries(self) -> Deliveries:
        return Deliveries(
            self._transfer.pusher,
            self._cache,
            self._context.send,
            policy=DeliveryPolicy(
                reply_after_push=self._settings.reply_after == "push",
                every_item=self._settings.shared_storage_path is not None,
            ),
            parking=self._parking,
            on_settled=self._standby.settled,
            address_of=lambda entry: self._memory.address + entry.region.offset,
            on_room=self._wake,
            on_unsent=self._count_unsent,
        )

    def _new_queue(self) -> TowerQueue:
        limits = BatchLimits(
            max_tokens=self._settings.max_batch_tokens, max_items=self._settings.max_batch_items
        )
        events = QueueEvents(
            running=self._running,
            landed=self._encoded,
            settled=self._tiers.settled,
            may_run=lambda: not self._deliveries.is_full,
            new_gate=self._standby.new_gate,
            parked=self._standby.parked,
        )
        return TowerQueue(
            self._tower,
            self._thread,
            self._memory,
            self._cache,
            Scheduler(limits),
            self._metrics,
            events,
            room_wait_s=self._settings.transfer_timeout_s,
        )

    def _wake(self) -> None:
        self._queue.wake()
        self._tiers.wake()

    def _facts(self) -> ReadyFacts:
        return ReadyFacts(
            model_type=self._tower.model_type,
            model_identity=checkpoint_identity(Path(self._settings.folder)),
            dtype=self._tower.dtype,
            width=self._tower.width,
            parameters=self._tower.parameter_names,
            session=self._transfer.session,
        )

    def _show_gauges(self) -> None:
        for state in self._arena.bytes_by_state():
            gauge = self._metrics.arena_bytes.labels(state)
            gauge.set_function(lambda state=state: self._arena.bytes_by_state()[state])  # type: ignore[misc]

    async def handle(self, received: Message) -> None:
        """Take one message of the front."""
        call_id = received.call_id
        if received.kind == "encode":
            self._ask(call_id, received.parse(Ask))
        elif received.kind == "pixels":
            self._take_pixels(call_id, received.parse(Pixels), received.frames)
        elif received.kind == "cancel":
            self._leave(call_id)

    def health(self) -> str | None:
        """Return what troubles the tower, or where embeddings go, or None."""
        return self._queue.trouble() or self._transfer.trouble()

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let the accepted items end within `grace_s`, fail the rest, free everything."""
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + grace_s
        while len(self._flights) or len(self._deliveries):
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        for call_id in list(self._asks):
            self._drop(call_id)
            self._fail(call_id, ShuttingDown("this worker is shutting down"))
        await self._deliveries.close()
        self._standby.close()
        # With the loops: if the one that empties it has failed, nobody does.
        emptied = asyncio.create_task(self._outbox.join())
        await asyncio.wait([emptied, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (emptied, *self._tasks):
            task.cancel()
        await self._transfer.close()
        await self._tiers.close()

    def _ask(self, call_id: str, ask: Ask) -> None:
        if self._stopping or self._deliveries.is_full:
            self._fail(call_id, refusal(stopping=self._stopping))
            return
        consumer = self._deliveries.consumer_of(ask)
        if (error := self._standby.refusal(consumer)) is not None:
            self._count_unsent(error)
            self._fail(call_id, error)
            return
        self._asks[call_id] = ask
        entry = self._cache.get(ask.key)
        if entry is None:
            self._wait_for(call_id, ask)
        elif not self._standby.holds(call_id, ask, consumer, entry.region.nbytes):
            del self._asks[call_id]
            self._metrics.cache_requests.labels("l1", "hit").inc()
            self._deliveries.begin(call_id, ask, entry, "cached")

    def _wait_for(self, call_id: str, ask: Ask) -> None:
        joined = self._flights.ask(call_id, ask.key, asyncio.get_running_loop().time())
        self._metrics.cache_requests.labels("l1", "joined" if joined else "miss").inc()
        if not joined and self._tiers.lookups.begin(ask.key):
            self._flights.look(ask.key)
        if joined:
            self._standby.changed(ask.key)
        self._admit()

    def _take_pixels(self, call_id: str, pixels: Pixels, frames: Sequence[Any]) -> None:
        key = self._flights.arrived(call_id)
        if key is None or len(frames) != 1:
            return
        try:
            self._queue.add(key, memoryview(frames[0]), pixels.layout, wanted=self._flights.since(key))
        except EpdError as error:
            self._landed(key, error, "encoded")

    def _leave(self, call_id: str) -> None:
        self._asks.pop(call_id, None)
        self._deliveries.cancel(call_id)
        self._drop(call_id)
        self._admit()

    def _drop(self, call_id: str) -> None:
        """Let `call_id` wait for nothing any more."""
        self._standby.left(call_id)
        key = self._flights.key_of(call_id)
        self._do(self._flights.leave(call_id))
        if key is not None:
            self._standby.changed(key)

    def _fail_waiting(self, consumer: str, error: EpdError) -> None:
        """Fail what waits for `consumer`, unless the tower runs it: then its delivery says how it ends."""
        waiting = [
            call_id
            for call_id, ask in self._asks.items()
            if self._deliveries.consumer_of(ask) == consumer and not self._flights.is_running(call_id)
        ]
        self._give_up(waiting, error)

    def _give_up(self, calls: Collection[str], error: EpdError) -> None:
        """Fail calls whose items were kept back for their consumers, to which nothing of theirs was sent."""
        if calls:
            consumers = sorted(
                {self._asks[call_id].consumer_zmq or "" for call_id in calls if call_id in self._asks}
            )
            facts = {"items": len(calls), "consumers": consumers}
            self._log.warning("items_unsent", **facts, error_code=error.code, reason=error.message)
        for call_id in calls:
            self._drop(call_id)
            self._count_unsent(error)
            self._fail(call_id, error)

    def _count_unsent(self, error: EpdError) -> None:
        self._metrics.ec_unsent.labels(error.code).inc()

    def _waiting_aside(self, parked: Iterable[str]) -> list[str]:
        """Return the calls of `parked` keys, and of those that are not asked for pixels because of them."""
        held = (key for key in self._flights.wanted() if self._standby.is_held(self._consumers_of(key)))
        return [call_id for key in (*parked, *held) for call_id in self._flights.waiting(key)]

    def _unpark(self, keys: Iterable[str]) -> None:
        self._queue.unpark(keys)

    def _consumers_of(self, key: str) -> list[str | None]:
        return self._consumers(self._flights.waiting(key))

    def _consumers(self, calls: Iterable[str]) -> list[str | None]:
        return [self._deliveries.consumer_of(self._asks[call_id]) for call_id in calls]

    def _admit(self) -> None:
        room = self._queue.pixel_bytes < self._settings.max_pending_pixel_bytes
        self._do(
            self._flights.admit(room=room, held=lambda calls: self._standby.is_held(self._consumers(calls)))
        )

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, AskForPixels):
                self._outbox.put_nowait(message("send_pixels", call_id=action.call_id))
            else:
                self._parking.release_key(action.key)
                self._queue.remove(action.key)

    def _running(self, items: Sequence[tuple[str, int]]) -> None:
        for key, rows in items:
            shape = (rows, self._tower.width)
            nbytes = self._tower.nbytes_of(rows)
            for call_id in self._flights.run(key):
                self._deliveries.announce(call_id, self._asks[call_id], nbytes, shape, self._tower.dtype)

    def _is_ours(self, value: StoredValue) -> bool:
        facts, nbytes = value.facts, value.rows.nbytes
        ours = (self._tower.width, self._tower.dtype, self._tower.nbytes_of(facts.rows))
        return (facts.width, facts.dtype, nbytes) == ours

    def _looked_up(self, key: str, result: Entry | EpdError | None) -> None:
        if result is None:
            self._flights.missed(key)
            self._admit()
        else:
            self._landed(key, result, "cached")

    def _encoded(self, key: str, result: Entry | EpdError) -> None:
        self._landed(key, result, "encoded")
        if isinstance(result, Entry):
            self._tiers.publish(key)

    def _landed(self, key: str, result: Entry | EpdError, source: str) -> None:
        for call_id in self._flights.land(key):
            if isinstance(result, EpdError):
                if isinstance(result, Overloaded) and self._deliveries.consumer_of(self._asks[call_id]):
                    self._count_unsent(result)
                self._fail(call_id, result)
            else:
                self._deliveries.begin(call_id, self._asks.pop(call_id), result, source)
        self._admit()

    def _fail(self, call_id: str, error: EpdError) -> None:
        self._deliveries.withdraw(call_id)
        self._asks.pop(call_id, None)
        self._outbox.put_nowait(error_message(error, call_id=call_id))

    async def _send_outbox(self) -> None:
        """Send what the synchronous steps decided, in order."""
        while True:
            outgoing = await self._outbox.get()
            with suppress(EngineUnavailable):  # the front is gone or going, and so are we
                await self._context.send(outgoing)
            self._outbox.task_done()


def main() -> int:
    """Run the engine in this process."""
    return run_engine(EncodeEngine)


if __name__ == "__main__":
    raise SystemExit(main())
