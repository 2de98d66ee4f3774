"""Claims about what a producer knows of a consumer from one push to the next."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from epdctl.domain import TransferId
from epdctl.ec.protocol import Refusal, Reservation, ReserveItem
from epdctl.errors import EpdError
from epdctl.worker.transfer import debts
from epdctl.worker.transfer.links import ConsumerLink, RankLink
from epdctl.worker.transfer.push_steps import Cancel
from tests.conftest import StartConsumer
from tests.stubs.consumer import StubConsumer
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit

GIVEN_UP = Cancel(TransferId("a"), "r", abandon=True, fenced=True)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let debts be paid when the consumer answers, and at no other time."""
    monkeypatch.setattr(debts, "RETRY_S", 1000.0)


@pytest.fixture
async def stub(ec_consumer: StartConsumer) -> StubConsumer:
    """Return a consumer that answers."""
    return await ec_consumer()


@pytest.fixture
async def link(stub: StubConsumer) -> AsyncIterator[ConsumerLink]:
    """Return the link to it."""
    context = zmq.asyncio.Context()
    made = ConsumerLink(stub.address, 5.0, context)
    yield made
    await made.close()
    context.destroy(linger=0)


async def reserve(rank: RankLink, transfer_id: str) -> None:
    """Reserve, and wait for the answer."""
    answers: list[Reservation | Refusal | EpdError] = []
    item = ReserveItem(transfer_id=transfer_id, mm_hash="h", nbytes=4, shape=(1, 4), dtype="uint8")
    rank.reserve(item, answers.append)
    await wait_until(lambda: bool(answers), "it is answered")
    assert isinstance(answers[0], Reservation)


async def test_any_answer_lets_debts_be_paid(link: ConsumerLink, stub: StubConsumer) -> None:
    """What a consumer was not told in a pause it is told when it answers something else."""
    (rank,) = await link.ranks()
    rank.owe(GIVEN_UP)
    await reserve(rank, "b")
    await wait_until(lambda: stub.cancelled_ids() == ["a"], "it is told")

    assert stub.calls_to("cancel")[0].body["reservation_id"] == "r"


async def test_an_id_that_is_reserved_again_is_not_cancelled(link: ConsumerLink, stub: StubConsumer) -> None:
    """A cancel that is still owed would hit the new use of its id (hazard 18)."""
    (rank,) = await link.ranks()
    rank.owe(GIVEN_UP)
    rank.owe(Cancel(TransferId("other"), "r", abandon=True))
    await reserve(rank, "a")
    await wait_until(lambda: bool(stub.cancelled_ids()), "what is still owed is paid")

    assert stub.cancelled_ids() == ["other"]


async def test_another_process_is_owed_nothing(link: ConsumerLink, stub: StubConsumer) -> None:
    """What the process before may have held is gone with it (hazard 16)."""
    (rank,) = await link.ranks()
    link.saw_session(rank, "s:1")
    rank.owe(GIVEN_UP)
    link.saw_session(rank, "s:1")
    assert len(rank._debts) == 1

    link.saw_session(rank, "s:2")

    assert len(rank._debts) == 0
