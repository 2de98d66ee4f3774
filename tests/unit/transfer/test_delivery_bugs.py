"""Claims about bugs in a delivery: they cost that delivery, at once, and never its source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from epdctl.ec.client import ControlClient
from epdctl.errors import ConsumerUnavailable, EpdError, InternalFailure
from epdctl.worker.transfer import debts, rank_push
from epdctl.worker.transfer.links import ConsumerLink, RankLink
from epdctl.worker.transfer.ports import PushSource, TransferOutcome
from epdctl.worker.transfer.push import Push
from epdctl.worker.transfer.push_steps import Action, PushPolicy
from epdctl.worker.transfer.sender import MAX_CONSUMERS
from tests.conftest import StartConsumer
from tests.stubs.process import wait_until
from tests.unit.transfer.ends import DATA, ProducerEnd, consumer_end, counted, producer_end, succeed
from tests.unit.transfer.engine import Started

pytestmark = pytest.mark.unit


def bug(*arguments: Any, **named: Any) -> Any:
    """Raise what no code of ours is written for."""
    raise ZeroDivisionError("a bug")


async def never(*arguments: Any) -> Any:
    """Take for ever, whoever asks."""
    await asyncio.Event().wait()


async def end_of(pushing: Coroutine[Any, Any, object]) -> object:
    """Return what `pushing` raised or returned, which it must do before any deadline of a push."""
    async with asyncio.timeout(10):
        return (await asyncio.gather(pushing, return_exceptions=True))[0]


def events(logs: Any) -> set[str]:
    """Return the names of the log lines."""
    return {line["event"] for line in logs}


def is_over(producer: ProducerEnd) -> bool:
    """Whether the source of `t` is free, once, and nothing is pending or open."""
    stats = producer.sender.stats()
    return producer.freed == ["t"] and stats.pending == stats.open == 0


class TestDiscovery:
    """Before the ranks are known."""

    @pytest.mark.parametrize("broken", ["ranks", "known_ranks", "_ask"])
    async def test_a_bug_ends_the_delivery(self, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
        """Whatever raises where the ranks are asked for: the push fails, is counted and frees its source."""
        monkeypatch.setattr(ConsumerLink, broken, bug)
        async with producer_end() as producer:
            with capture_logs() as logs:
                end = await end_of(producer.sender.push(producer.item("tcp://127.0.0.1:1", "t", DATA)))

            assert isinstance(end, InternalFailure)
            assert is_over(producer)
            assert counted(producer) == [(TransferOutcome.FAILED, 0)]
            assert events(logs) == {"delivery_broken"}

    async def test_what_the_resolver_takes_for_none_is_unavailable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A host that cannot be encoded for the resolver is one that nobody can reach, at once."""
        address = "tcp://name.invalid:1"

        async def refuse(*arguments: Any, **named: Any) -> Any:
            raise UnicodeError("label empty or too long")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", refuse)
        async with producer_end() as producer:
            end = await end_of(producer.sender.push(producer.item(address, "t", DATA)))

            assert isinstance(end, ConsumerUnavailable)
            assert is_over(producer)
            assert not producer.sender.is_suspect(address)

    async def test_discovery_has_a_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A question for the ranks that never ends fails the push in its time; the consumer is suspect."""
        monkeypatch.setattr(ConsumerLink, "ranks", never)
        async with producer_end(policy=PushPolicy(deadline_s=0.2)) as producer:
            end = await end_of(producer.sender.push(producer.item("tcp://127.0.0.1:1", "t", DATA)))

            assert isinstance(end, ConsumerUnavailable)
            assert is_over(producer)
            assert producer.sender.is_suspect("tcp://127.0.0.1:1")

    async def test_who_leaves_meanwhile_frees_the_source_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the ranks are asked for nothing reads the bytes: a caller that leaves takes them along."""
        monkeypatch.setattr(ConsumerLink, "ranks", never)
        async with producer_end() as producer:
            item = producer.item("tcp://127.0.0.1:1", "t", DATA)
            pushing = asyncio.create_task(producer.sender.push(item))
            await wait_until(lambda: producer.sender.stats().pending == 1, "it is asked for")
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)

            assert producer.freed == ["t"]
            assert producer.sender.stats().pending == 0

    async def test_bytes_that_come_after_the_end_are_let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An item that was announced and failed: its source is not kept when it comes."""
        monkeypatch.setattr(ConsumerLink, "ranks", bug)
        async with producer_end() as producer:
            item = producer.item("tcp://127.0.0.1:1", "t", DATA)
            delivery = producer.sender.announce(item)
            await wait_until(lambda: producer.sender.stats().open == 0, "it has failed")
            source = PushSource(address=item.address, digest=item.digest, on_free=item.on_source_free)
            end = await end_of(delivery.push(source))

            assert isinstance(end, InternalFailure)
            assert is_over(producer)


class TestSteps:
    """After the ranks are known."""

    @pytest.mark.parametrize("step", ["start", "give_source", "answered"])
    async def test_a_bug_before_the_write_ends_the_push(
        self, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """A step that raises ends its push with a log line; nothing was written, so the source is free."""
        monkeypatch.setattr(Push, step, bug)
        async with consumer_end() as consumer, producer_end() as producer:
            with capture_logs() as logs:
                end = await end_of(producer.sender.push(producer.item(consumer.address, "t", DATA)))

            assert isinstance(end, InternalFailure)
            assert is_over(producer)
            assert counted(producer) == [(TransferOutcome.FAILED, 0)]
            assert "push_broken" in events(logs)

    @pytest.mark.parametrize("step", ["written", "settled", "tick"])
    async def test_a_bug_during_the_write_keeps_what_is_read(
        self, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """The caller hears at once, the write is withdrawn, and its source waits for the engine."""
        policy = PushPolicy(write_base_s=0.2)
        started: list[Started] = []
        async with (
            consumer_end() as consumer,
            producer_end(policy=policy, on_write=started.append) as producer,
        ):
            pushing = asyncio.create_task(producer.sender.push(producer.item(consumer.address, "t", DATA)))
            await wait_until(lambda: bool(started), "the write has started")
            monkeypatch.setattr(Push, step, bug)
            if step != "tick":
                started[0].end(False, settle=step == "settled")
            async with asyncio.timeout(10):
                (end,) = await asyncio.gather(pushing, return_exceptions=True)
            await asyncio.sleep(0)
            freed_early = list(producer.freed)
            started[0].settle()
            await wait_until(lambda: is_over(producer), "the source is free")

            assert isinstance(end, InternalFailure)
            assert freed_early == (["t"] if step == "settled" else [])
            assert producer.engine.withdrawn == ([] if step == "settled" else [started[0].job])

    @pytest.mark.parametrize("call", ["status", "cancel"])
    async def test_an_exchange_that_breaks_is_a_lost_one(
        self, ec_consumer: StartConsumer, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        """What raises in a single question is told to its push as no answer, which it knows how to go on
        from: it ends, and its source is free."""
        monkeypatch.setattr(ControlClient, call, bug)
        stub = await ec_consumer({"reserve": "follower"} if call == "status" else {"complete": "false"})
        async with producer_end(on_write=succeed) as producer:
            end = await end_of(producer.sender.push(producer.item(f"tcp://127.0.0.1:{stub.port}", "t", DATA)))
            await wait_until(lambda: is_over(producer), "nothing is open")

            assert isinstance(end, EpdError)

    async def test_a_greeting_that_breaks_ends_the_push(
        self, ec_consumer: StartConsumer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A consumer is greeted before a late write; a bug there ends the push, and not a byte goes out."""
        monkeypatch.setattr(rank_push, "FRESH_S", -1.0)
        monkeypatch.setattr(RankLink, "greet", bug)
        stub = await ec_consumer()
        async with producer_end(on_write=succeed) as producer:
            end = await end_of(producer.sender.push(producer.item(f"tcp://127.0.0.1:{stub.port}", "t", DATA)))

            assert isinstance(end, InternalFailure)
            assert is_over(producer)
            assert producer.engine.started == []

    async def test_one_rank_that_breaks_gives_the_others_up(
        self, ec_consumer: StartConsumer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With two ranks a bug at the first ends both, and the source is let go once."""
        base, first, second = await ec_consumer(), await ec_consumer(), await ec_consumer()
        base.rank_ports = [first.port, second.port]
        start = Push.start
        started: list[Push] = []

        def once(push: Push, now: float) -> list[Action]:
            started.append(push)
            return bug() if len(started) == 1 else start(push, now)  # type: ignore[no-any-return]

        monkeypatch.setattr(Push, "start", once)
        async with producer_end(on_write=succeed) as producer:
            end = await end_of(producer.sender.push(producer.item(f"tcp://127.0.0.1:{base.port}", "t", DATA)))
            await wait_until(lambda: is_over(producer), "nothing is open")

            assert isinstance(end, InternalFailure)

    async def test_others_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A bug in one of many pushes to one consumer costs that one."""
        answered = Push.answered

        def one(push: Push, *arguments: Any) -> list[Action]:
            return bug() if push.transfer_id == "t3" else answered(push, *arguments)  # type: ignore[no-any-return]

        monkeypatch.setattr(Push, "answered", one)
        async with consumer_end() as consumer, producer_end() as producer:
            names = [f"t{number}" for number in range(6)]
            items = [producer.item(consumer.address, name, DATA) for name in names]
            ends = await asyncio.gather(*map(producer.sender.push, items), return_exceptions=True)

            assert [isinstance(end, InternalFailure) for end in ends] == [name == "t3" for name in names]
            assert sorted(producer.freed) == names


class TestCallbacks:
    """What is told to others."""

    @pytest.mark.parametrize("callback", ["on_answer", "on_source_free", "observe"])
    async def test_a_callback_that_fails_is_its_own_loss(
        self, monkeypatch: pytest.MonkeyPatch, callback: str
    ) -> None:
        """Whoever is called back and raises loses that news, and the delivery is delivered."""
        async with consumer_end() as consumer, producer_end() as producer:
            item = producer.item(consumer.address, "t", DATA)
            if callback == "observe":
                object.__setattr__(producer.sender._around, "observe", bug)
            else:
                object.__setattr__(item, callback, bug)
            with capture_logs() as logs:
                result = await producer.sender.push(item)

            assert result.outcome is TransferOutcome.DELIVERED
            assert producer.sender.stats().open == 0
            assert events(logs) == {"callback_failed"}


async def test_an_idle_consumer_that_cannot_be_closed_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes room for further consumers is closed in the background, and not unheard."""
    close = ConsumerLink.close
    failing: list[Callable[..., Any]] = [bug]

    async def first_fails(link: ConsumerLink) -> None:
        await close(link)
        if failing:
            failing.pop()()

    monkeypatch.setattr(ConsumerLink, "close", first_fails)
    with capture_logs() as logs:
        async with producer_end() as producer:
            for number in range(MAX_CONSUMERS + 1):
                producer.sender._consumer(f"tcp://127.0.0.1:{number + 1}")
            await wait_until(lambda: not producer.sender._closing, "the idle ones are closed")

    assert events(logs) == {"ec_consumer_not_closed"}


async def test_a_debt_that_breaks_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel that raises is dropped with a log line; those behind it are told."""
    told: list[str] = []

    async def ask(cancel: rank_push.Cancel) -> None:
        told.append(cancel.transfer_id)
        if cancel.transfer_id == "a":
            bug()

    owed = debts.Debts(ask)
    with capture_logs() as logs:
        for name in ("a", "b"):
            owed.add(rank_push.Cancel(transfer_id=rank_push.TransferId(name), reservation_id=""))
        owed.wake()
        await wait_until(lambda: not len(owed), "nothing is owed")

    assert told == ["a", "b"]
    assert events(logs) == {"ec_cancel_broken"}
