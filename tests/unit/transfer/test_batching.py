"""Claims about questions that are gathered into messages."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import chain
from typing import Any

import pytest
from structlog.testing import capture_logs

from epdctl.errors import ConsumerUnavailable, EpdError
from epdctl.worker.transfer.batching import MAX_BATCH, Batched
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit


class Consumer:
    """Answers each item with its double, once it is let."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        self.gate = asyncio.Event()
        self.fault: Exception | None = None

    async def ask_many(self, items: Sequence[int]) -> list[int]:
        """Take one message."""
        self.messages.append(list(items))
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return [2 * item for item in items]


async def test_what_is_asked_for_in_one_turn_goes_together() -> None:
    """One message, and each answer reaches the one who asked for it."""
    consumer = Consumer()
    consumer.gate.set()
    batched: Batched[int, int] = Batched(consumer.ask_many)
    answers: dict[int, int | EpdError] = {}
    for item in range(5):
        batched.ask(item, lambda answer, item=item: answers.update({item: answer}))  # type: ignore[misc]
    await wait_until(lambda: len(answers) == 5, "all are answered")

    assert {item: 2 * item for item in range(5)} == answers
    assert consumer.messages == [[0, 1, 2, 3, 4]]


async def test_a_burst_begins_with_a_small_message() -> None:
    """The first items of a burst get going while the rest is asked for; after that messages are full."""
    consumer = Consumer()
    consumer.gate.set()
    batched: Batched[int, int] = Batched(consumer.ask_many, first=8)
    answers: list[int | EpdError] = []
    for item in range(8 + MAX_BATCH + 3):
        batched.ask(item, answers.append)
    await wait_until(lambda: len(answers) == 8 + MAX_BATCH + 3, "all are answered")

    assert [len(message) for message in consumer.messages] == [8, MAX_BATCH, 3]
    assert list(range(8 + MAX_BATCH + 3)) == list(chain(*consumer.messages))


async def test_the_first_message_of_a_burst_is_asked_before_the_burst_is_over() -> None:
    """The consumer has it while the rest of the burst is still being made."""
    asked: list[list[int]] = []

    def ask_many(items: Sequence[int]) -> Coroutine[Any, Any, Sequence[int]]:
        asked.append(list(items))
        return consumer.ask_many(items)

    consumer = Consumer()
    consumer.gate.set()
    batched: Batched[int, int] = Batched(ask_many, first=2)
    answers: list[int | EpdError] = []
    for item in range(2):
        batched.ask(item, answers.append)
    early = list(asked)
    batched.ask(2, answers.append)
    await wait_until(lambda: len(answers) == 3, "all are answered")

    assert early == [[0, 1]]
    assert asked == [[0, 1], [2]]


async def test_what_comes_while_a_message_is_under_way_goes_into_the_next() -> None:
    """A busy consumer gets few messages."""
    consumer = Consumer()
    batched: Batched[int, int] = Batched(consumer.ask_many)
    answers: list[int | EpdError] = []
    batched.ask(0, answers.append)
    await wait_until(lambda: len(consumer.messages) == 1, "a message is under way")
    batched.ask(1, answers.append)
    batched.ask(2, answers.append)
    consumer.gate.set()
    await wait_until(lambda: len(answers) == 3, "all are answered")

    assert consumer.messages == [[0], [1, 2]]


async def test_an_answer_that_does_not_come_delays_nobody() -> None:
    """What has waited long enough is asked for although the message before it is still open."""
    consumer = Consumer()
    batched: Batched[int, int] = Batched(consumer.ask_many)
    batched.ask(0, lambda answer: None)
    await wait_until(lambda: len(consumer.messages) == 1, "a message is under way")
    batched.ask(1, lambda answer: None)
    await wait_until(lambda: len(consumer.messages) == 2, "the next one goes out")
    batched.close()

    assert consumer.messages == [[0], [1]]


async def test_everybody_in_a_message_hears_what_it_failed_with() -> None:
    """A lost message is lost for all that were in it, and for nobody else."""
    consumer = Consumer()
    consumer.fault = ConsumerUnavailable("gone")
    consumer.gate.set()
    batched: Batched[int, int] = Batched(consumer.ask_many)
    answers: list[int | EpdError] = []
    batched.ask(0, answers.append)
    batched.ask(1, answers.append)
    await wait_until(lambda: len(answers) == 2, "both have heard")
    consumer.fault = None
    batched.ask(2, answers.append)
    await wait_until(lambda: len(answers) == 3, "the next is answered")

    assert all(isinstance(answer, ConsumerUnavailable) for answer in answers[:2])
    assert answers[2] == 4


async def test_a_fault_of_ours_is_told_as_a_lost_message() -> None:
    """Whatever goes wrong in asking, nobody waits for ever."""
    consumer = Consumer()
    consumer.fault = RuntimeError("a bug")
    consumer.gate.set()
    batched: Batched[int, int] = Batched(consumer.ask_many)
    answers: list[int | EpdError] = []
    batched.ask(0, answers.append)
    await wait_until(lambda: len(answers) == 1, "it is told")

    assert isinstance(answers[0], ConsumerUnavailable)


@pytest.mark.parametrize("first", [2, MAX_BATCH])
async def test_a_message_that_cannot_be_made_is_told_at_once(first: int) -> None:
    """A bug in making a message reaches all who are in it, neither who asks nor the next message."""
    broken = [True]

    def ask_many(items: Sequence[int]) -> Coroutine[Any, Any, Sequence[int]]:
        if broken:
            raise TypeError("cannot be encoded")
        return consumer.ask_many(items)

    consumer = Consumer()
    consumer.gate.set()
    batched: Batched[int, int] = Batched(ask_many, first=first)
    answers: list[int | EpdError] = []
    with capture_logs() as logs:
        batched.ask(0, answers.append)
        batched.ask(1, answers.append)
        assert answers == []
        await wait_until(lambda: len(answers) == 2, "both have heard")
    broken.clear()
    batched.ask(2, answers.append)
    await wait_until(lambda: len(answers) == 3, "the next is answered")

    assert all(isinstance(answer, ConsumerUnavailable) for answer in answers[:2])
    assert answers[2] == 4
    assert [line["event"] for line in logs] == ["callback_failed"]


async def test_what_is_queued_behind_a_message_that_cannot_be_made_is_asked_for() -> None:
    """The rest of a burst is answered although its first message came to nothing."""

    def ask_many(items: Sequence[int]) -> Coroutine[Any, Any, Sequence[int]]:
        if 0 in items:
            raise TypeError("cannot be encoded")
        return consumer.ask_many(items)

    consumer = Consumer()
    consumer.gate.set()
    batched: Batched[int, int] = Batched(ask_many, first=1)
    answers: dict[int, int | EpdError] = {}
    for item in range(3):
        batched.ask(item, lambda answer, item=item: answers.update({item: answer}))  # type: ignore[misc]
    await wait_until(lambda: len(answers) == 3, "all have heard")

    assert isinstance(answers[0], ConsumerUnavailable)
    assert (answers[1], answers[2]) == (2, 4)


async def test_too_few_answers_are_answers_to_nobody() -> None:
    """Whose answer is missing cannot be known: everybody hears once that the exchange failed."""

    async def ask_many(items: Sequence[int]) -> list[int]:
        return list(items[1:])

    batched: Batched[int, int] = Batched(ask_many)
    answers: list[int | EpdError] = []
    for item in range(3):
        batched.ask(item, answers.append)
    await wait_until(lambda: len(answers) >= 3, "all have heard")

    assert [type(answer) for answer in answers] == [ConsumerUnavailable] * 3


async def test_one_that_cannot_take_its_answer_takes_nobody_with_it() -> None:
    """The answers behind it still arrive."""
    consumer = Consumer()
    consumer.gate.set()
    batched: Batched[int, int] = Batched(consumer.ask_many)
    answers: list[int | EpdError] = []

    def fail(answer: int | EpdError) -> None:
        raise RuntimeError("in the caller")

    batched.ask(0, fail)
    batched.ask(1, answers.append)
    await wait_until(lambda: answers == [2], "the second is answered")


async def test_closing_drops_what_is_queued_and_under_way() -> None:
    """After the end nothing is sent and nobody is called."""
    consumer = Consumer()
    batched: Batched[int, int] = Batched(consumer.ask_many)
    answers: list[int | EpdError] = []
    batched.ask(0, answers.append)
    await wait_until(lambda: len(consumer.messages) == 1, "a message is under way")
    batched.ask(1, answers.append)
    batched.close()
    consumer.gate.set()
    for _ in range(10):
        await asyncio.sleep(0)

    assert answers == []
    assert consumer.messages == [[0]]
