"""A model of producers and one consumer that exchange EC messages over a bad network, in virtual time.

Both machines are the real ones; network, transfer engine, memory, clock and crashes are modelled here. The
model breaks off with `Violation` when bytes land where they may not, a reader sees another item's bytes, a
source is released while it is read, a follower has no writer, a refreshed id is refused, or a push is said to
be delivered that nobody published, ends after its deadline, or leaves a reservation to the consumer's leases
although all its messages arrived. Numbers are seconds of virtual time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from epdctl.domain import MmHash, TransferId
from epdctl.ec.protocol import Reservation, ReserveItem
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.ledger import HELD_BY_WRITER, State
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.push import Push
from epdctl.worker.transfer.push_steps import (
    Action,
    Cancel,
    Complete,
    Exchange,
    Finish,
    Poll,
    ReleaseSource,
    Reserve,
    Withdraw,
    Write,
)
from tests.unit.transfer.exchange_sides import (
    BASE,
    CONTROL_TIMEOUT_S,
    LATEST_LANDING_S,
    PUSHES,
    Consumer,
    Faults,
    Producer,
    Violation,
)


class World:
    """Runs one random exchange; `run` returns when everything has ended."""

    def __init__(self, seed: int, faults: Faults, *, pushes: int = 12, arena_bytes: int = 4096) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.arena_bytes = arena_bytes
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.incarnations = itertools.count(1)
        self.consumer = Consumer(next(self.incarnations), arena_bytes)
        self.producers: list[Producer] = []
        self.published: set[str] = set()
        self.refreshed: set[TransferId] = set()
        self.pushes = pushes

    def run(self) -> None:
        """Let everything happen."""
        for _ in range(self.pushes):
            self.at(self.random.uniform(0, 40), self._begin)
        for _ in range(self.faults.consumer_restarts):
            self.at(self.random.uniform(1, 60), self._restart_consumer)
        for _ in range(self.faults.producer_restarts):
            self.at(self.random.uniform(1, 60), self._crash_producers)
        for second in range(400):
            self.at(float(second), self._second)
        while self.queue:
            at, _, happen = heapq.heappop(self.queue)
            self.now = at
            happen()
            self._check_followers()

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Schedule something."""
        heapq.heappush(self.queue, (when, next(self.numbers), happen))

    def after(self, delay: float, happen: Callable[[], None]) -> None:
        """Schedule something from now."""
        self.at(self.now + delay, happen)

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # Producers

    def _begin(self) -> None:
        mm_hash = MmHash(f"h{self.random.randrange(5)}")
        nbytes = 100 * (1 + int(mm_hash[1:]) * 3)
        number = next(self.numbers)
        push = Push(
            nbytes,
            transfer_id=TransferId(f"t{number}"),
            spare_ids=[TransferId(f"s{number}"), TransferId(f"u{number}")],
            policy=PUSHES,
        )
        producer = Producer(push, mm_hash, nbytes, began_in=self.consumer.session)
        self.producers.append(producer)
        self._do(producer, push.start(self.now))
        self.after(self.random.choice(self.faults.source_delays), lambda: self._source(producer))
        if self._chance(self.faults.aborts):
            self.after(self.random.uniform(0, 6), lambda: self._abort(producer))
        if self._chance(self.faults.proxy_cancels):
            self.after(self.random.uniform(0, 8), lambda: self._proxy_cancel(producer))
        if self._chance(0.6):
            self.after(self.random.uniform(0, 10), lambda: self._take(producer, 60))

    def _source(self, producer: Producer) -> None:
        if producer.alive:
            producer.source_given = True
            producer.ends_by = self.now + PUSHES.deadline_s
            self._do(producer, producer.push.give_source(self.now))

    def _abort(self, producer: Producer) -> None:
        if producer.alive:
            self._do(producer, producer.push.abort(self.now))

    def _do(self, producer: Producer, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reserve() | Complete() | Poll() | Cancel():
                    self._send(producer, action)
                case Write():
                    self._write(producer, action)
                case ReleaseSource():
                    producer.releases += 1
                    if producer.reading:
                        raise Violation("a source was released while it is read")
                case Finish():
                    producer.finishes.append(action)
                    producer.finished_at = self.now
                    self._check_finish(producer, action)
                case Withdraw():
                    pass
        due = producer.push.due_at
        if due is not None:
            self.at(max(due, self.now), lambda: self._tick(producer))
        if producer.push.is_over:
            self._check_nothing_left(producer)

    def _tick(self, producer: Producer) -> None:
        if producer.alive:
            self._do(producer, producer.push.tick(self.now))

    def _crash_producers(self) -> None:
        for producer in self.producers:
            producer.alive = producer.alive and self._chance(0.5)

    # The network

    def _send(self, producer: Producer, asked: Exchange) -> None:
        timeout = self.now + CONTROL_TIMEOUT_S
        copies = 2 if self._chance(self.faults.doubled) else 1
        producer.disturbed |= copies > 1
        for _ in range(copies):
            if self._is_lost(producer):
                continue
            self.after(self._delay(producer), lambda: self._arrive(producer, asked))
        self.at(timeout, lambda: self._lost(producer, asked))

    def _arrive(self, producer: Producer, asked: Exchange) -> None:
        answer = self._serve(producer, asked)
        if not self._is_lost(producer):
            self.after(self._delay(producer), lambda: self._answered(producer, asked, answer))

    def _answered(self, producer: Producer, asked: Exchange, answer: object) -> None:
        if producer.alive:
            self._do(producer, producer.push.answered(asked, answer, self.now))  # type: ignore[arg-type]

    def _lost(self, producer: Producer, asked: Exchange) -> None:
        if producer.alive:
            self._do(producer, producer.push.lost(asked, self.now))

    def _is_lost(self, producer: Producer) -> bool:
        lost = self._chance(self.faults.lost)
        producer.disturbed |= lost
        return lost

    def _delay(self, producer: Producer) -> float:
        late = self._chance(self.faults.late)
        producer.disturbed |= late
        return 2.5 if late else self.random.choice((0.001, 0.01, 0.1, 0.6))

    def _serve(self, producer: Producer, asked: Exchange) -> object:
        consumer, reservations = self.consumer, self.consumer.reservations
        match asked:
            case Reserve(transfer_id):
                producer.ids.add(transfer_id)
                item = ReserveItem(
                    transfer_id=transfer_id,
                    mm_hash=producer.mm_hash,
                    nbytes=producer.nbytes,
                    shape=(producer.nbytes,),
                    dtype="uint8",
                )
                answer = reservations.reserve(item, reservation_id=f"r{next(self.numbers)}", now=self.now)
                if isinstance(answer, Reservation) and transfer_id in self.refreshed:
                    self.refreshed.discard(transfer_id)
                    if answer.is_cancelled:
                        raise Violation(f"{transfer_id} was refreshed, and is refused")
                if isinstance(answer, Reservation) and answer.write:
                    consumer.arena.owners[answer.dst_ptr] = transfer_id
                return answer
            case Complete(transfer_id, reservation_id):
                region = reservations.region_to_verify(transfer_id, reservation_id)
                intact = region is None or consumer.memory.get(region.offset) == producer.mm_hash
                done = reservations.complete(transfer_id, reservation_id, intact=intact, now=self.now)
                if done.completed:
                    self.published.add(producer.mm_hash)
                return done
            case Poll(transfer_id):
                return reservations.status(transfer_id)
            case Cancel():
                known = reservations._ledger.get(asked.transfer_id) is not None
                acted = reservations.cancel(
                    asked.transfer_id,
                    asked.reservation_id,
                    abandon=asked.abandon,
                    refresh=asked.refresh,
                    failed=asked.failed,
                    fenced=asked.fenced,
                    now=self.now,
                )
                if acted:
                    # Of an id that is unknown there a cancel leaves a tombstone, refresh or not.
                    usable = asked.refresh and known
                    (self.refreshed.add if usable else self.refreshed.discard)(asked.transfer_id)
                return acted

    # The transfer engine and the memory

    def _write(self, producer: Producer, write: Write) -> None:
        producer.reading = True
        consumer, transfer_id = self.consumer, producer.push.transfer_id
        took = self.random.choice((0.001, 0.1, 4.0))
        reachable = write.session == consumer.session
        if reachable and not self._chance(self.faults.write_fails):
            self.after(took, lambda: self._land(consumer, write, producer, transfer_id))
            self.after(took, lambda: self._written(producer, True))
            self.after(took, lambda: self._settle(producer))
            return
        settles = took + self.random.choice((0.0, 3.0, 9.0))
        self.after(took, lambda: self._written(producer, False))
        self.after(settles, lambda: self._settle(producer))
        if reachable and self._chance(0.5):
            late = settles + self.random.uniform(0, LATEST_LANDING_S)
            self.after(late, lambda: self._land(consumer, write, producer, transfer_id))

    def _written(self, producer: Producer, ok: bool) -> None:
        if producer.alive:
            self._do(producer, producer.push.written(ok, self.now))

    def _settle(self, producer: Producer) -> None:
        producer.reading = False
        if producer.alive:
            self._do(producer, producer.push.settled(self.now))

    def _land(self, consumer: Consumer, write: Write, producer: Producer, transfer_id: TransferId) -> None:
        owner = consumer.arena.owners.get(write.destination)
        if owner != transfer_id:
            raise Violation(f"bytes of {transfer_id} landed in a region of {owner or 'nobody'}")
        corrupt = self._chance(self.faults.corrupt)
        consumer.memory[write.destination - BASE] = "garbage" if corrupt else producer.mm_hash

    # The consumer

    def _second(self) -> None:
        self.consumer.reservations.expire(self.now)
        self.consumer.reservations.collect()

    def _proxy_cancel(self, producer: Producer) -> None:
        producer.disturbed = True
        self.refreshed.discard(producer.push.transfer_id)
        self.consumer.reservations.cancel(producer.push.transfer_id, now=self.now)

    def _take(self, producer: Producer, tries: int) -> None:
        consumer = self.consumer
        transfer_id = producer.push.transfer_id
        found = consumer.reservations.find(transfer_id, producer.mm_hash)
        if not isinstance(found, Item):
            if tries:
                self.after(0.5, lambda: self._take(producer, tries - 1))
            return
        # Taken from elsewhere: its own producer is told that it need not come any more.
        self.refreshed.discard(transfer_id)
        consumer.reservations.take(transfer_id, found, self.now)
        self._check_bytes(consumer, found)
        self.after(self.random.uniform(0, 20), lambda: self._release(consumer, found))

    def _release(self, consumer: Consumer, item: Item) -> None:
        self._check_bytes(consumer, item)
        consumer.reservations.release(item)

    def _check_bytes(self, consumer: Consumer, item: Item) -> None:
        if consumer.memory.get(item.region.offset) != item.mm_hash:
            raise Violation(f"a reader of {item.mm_hash} saw other bytes")

    def _restart_consumer(self) -> None:
        self.consumer = Consumer(next(self.incarnations), self.arena_bytes)

    # What must hold all the time

    def _check_followers(self) -> None:
        records = list(self.consumer.reservations._ledger._records.values())
        written = {id(record.item) for record in records if record.state in HELD_BY_WRITER}
        for record in records:
            if record.state is State.FOLLOWING and id(record.item) not in written:
                raise Violation(f"{record.transfer_id} follows nobody")

    def _check_finish(self, producer: Producer, finish: Finish) -> None:
        arrived = finish.outcome in (TransferOutcome.DELIVERED, TransferOutcome.CACHED)
        if arrived and producer.mm_hash not in self.published:
            raise Violation(f"{producer.push.transfer_id} is {finish.outcome}, and nobody published it")

    def _check_nothing_left(self, producer: Producer) -> None:
        """A push that is over has told the consumer all: no lease has to end what it began."""
        if producer.disturbed or producer.began_in != self.consumer.session:
            return
        for transfer_id in producer.ids:
            record = self.consumer.reservations._ledger.get(transfer_id)
            if record is not None and record.state is not State.READY:
                raise Violation(f"{transfer_id} is over, and left {record.state} behind")


def check_ended(world: World) -> None:
    """Raise Violation unless every transfer ended and nothing is held."""
    for producer in world.producers:
        if not producer.alive:
            continue
        if len(producer.finishes) != 1:
            raise Violation(f"{producer.push.transfer_id} told its caller {len(producer.finishes)} times")
        if producer.releases != int(producer.source_given):
            raise Violation(f"{producer.push.transfer_id} released its source {producer.releases} times")
        if producer.finished_at > producer.ends_by + 0.001:
            raise Violation(
                f"{producer.push.transfer_id} ended {producer.finished_at - producer.ends_by} s late"
            )
        if not producer.push.is_over:
            raise Violation(f"{producer.push.transfer_id} never ended: {producer.push.phase}")
    counts = world.consumer.reservations.counts()
    if any(count for state, count in counts.items()):
        raise Violation(f"left open: {counts}")
    states = world.consumer.arena.bytes_by_state()
    held = states["used"] - world.consumer.reservations.items.resident_bytes
    if held or states["pinned"] or states["quarantined"]:
        raise Violation(f"bytes left: {states}")


def outcomes(world: World) -> list[TransferOutcome]:
    """Return how the surviving pushes ended."""
    return [producer.finishes[0].outcome for producer in world.producers if producer.alive]
