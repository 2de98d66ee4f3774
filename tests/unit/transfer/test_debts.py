"""Claims about cancels that a consumer did not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from epdctl.domain import TransferId
from epdctl.errors import ConsumerUnavailable
from epdctl.worker.transfer import debts as module
from epdctl.worker.transfer.debts import Debts
from epdctl.worker.transfer.push_steps import Cancel
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit


class Consumer:
    """Answers cancels, or not."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.asked = 0
        self.is_silent = False

    async def ask(self, cancel: Cancel) -> bool:
        """Take one cancel."""
        self.asked += 1
        if self.is_silent:
            raise ConsumerUnavailable("silent")
        self.told.append(cancel.transfer_id)
        return True


def cancel(transfer_id: str) -> Cancel:
    """Return a cancel that gives everything up."""
    return Cancel(TransferId(transfer_id), "", abandon=True)


@pytest.fixture
async def consumer() -> Consumer:
    """Return a consumer that answers."""
    return Consumer()


@pytest.fixture
async def debts(consumer: Consumer) -> AsyncIterator[Debts]:
    """Return what is owed to the consumer."""
    owed = Debts(consumer.ask)
    yield owed
    owed.close()


async def test_all_is_told_when_the_consumer_answers(debts: Debts, consumer: Consumer) -> None:
    """In the order in which it was owed, once each."""
    for name in ("a", "b", "c"):
        debts.add(cancel(name))
    await asyncio.sleep(0)
    early = list(consumer.told)
    debts.wake()
    await wait_until(lambda: len(debts) == 0, "nothing is owed")

    assert early == []
    assert consumer.told == ["a", "b", "c"]


async def test_it_is_tried_again_without_a_sign_of_life(
    debts: Debts, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that is asked nothing else is told as well, and one that stays silent is asked again."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    consumer.is_silent = True
    debts.add(cancel("a"))
    await wait_until(lambda: consumer.asked >= 2, "it was asked again")
    consumer.is_silent = False
    await wait_until(lambda: consumer.told == ["a"], "it is told")


async def test_an_id_in_use_again_is_forgiven(debts: Debts, consumer: Consumer) -> None:
    """A late cancel would hit the new use."""
    debts.add(cancel("a"))
    debts.add(cancel("b"))
    debts.forgive("a")
    debts.wake()
    await wait_until(lambda: len(debts) == 0, "nothing is owed")

    assert consumer.told == ["b"]


async def test_debts_are_bounded_in_number_and_time(
    debts: Debts, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go first; what is older than any lease is not asked for."""
    monkeypatch.setattr(module, "LIMIT", 2)
    for name in ("a", "b", "c"):
        debts.add(cancel(name))
    kept = len(debts)
    monkeypatch.setattr(module, "LIFETIME_S", -1.0)
    debts.add(cancel("d"))
    debts.wake()
    await wait_until(lambda: len(debts) == 0, "nothing is owed")

    assert kept == 2
    assert consumer.told == ["c"]


async def test_a_process_that_is_gone_is_owed_nothing(debts: Debts, consumer: Consumer) -> None:
    """What it held went with it."""
    debts.add(cancel("a"))
    debts.clear()
    debts.wake()
    for _ in range(5):
        await asyncio.sleep(0)

    assert consumer.asked == 0
