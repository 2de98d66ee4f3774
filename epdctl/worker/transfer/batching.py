"""Many small questions to one control address, gathered into few messages.

    reserves = Batched(ask_many, first=8)
    reserves.ask(item, answered)       # answered(answer), or answered(error) with what its batch failed with

Rules of this file: a message costs both ends more than the items in it, so what is asked for while one is
under way goes into the next. What has waited for `MAX_WAIT_S` is asked for whatever is under way: an answer
that does not come delays nobody. Answers are calls and no futures, which would cost as much as what is done
with them; everybody gets one, and one that raises takes nobody with it. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from epdctl.errors import ConsumerUnavailable, EpdError
from epdctl.worker.transfer.callbacks import call_back

MAX_BATCH = 64
MAX_WAIT_S = 0.02

I = TypeVar("I")  # noqa: E741 - an item that is asked for
A = TypeVar("A")
_Batch: TypeAlias = list[tuple[I, Callable[[A | EpdError], None]]]


class Batched(Generic[I, A]):
    """Asks for items together; a message after a pause goes out at once when it has `first`, its most.

    `ask_many` may send the question when it is called, or when what it returns is awaited. An EpdError that
    is raised then is told to all who are in the message; anything else that it raises, as a lost exchange.
    """

    def __init__(
        self, ask_many: Callable[[Sequence[I]], Coroutine[Any, Any, Sequence[A]]], *, first: int = MAX_BATCH
    ) -> None:
        self._ask_many = ask_many
        self._first = first
        self._queue: _Batch[I, A] = []
        self._under_way: dict[asyncio.Task[None], _Batch[I, A]] = {}
        self._looking = False
        self._overdue: asyncio.TimerHandle | None = None
        self._sent_at = float("-inf")
        self._loop = asyncio.get_running_loop()

    def ask(self, item: I, answered: Callable[[A | EpdError], None]) -> None:
        """Ask for `item`, and call `answered` with the answer or the error."""
        self._queue.append((item, answered))
        if len(self._queue) == self._first and not self._under_way and self._has_paused():
            self._send_next(self._first)
            return
        if not self._looking and not self._under_way:
            self._looking = True
            self._loop.call_soon(self._look)
        if self._overdue is None:
            self._overdue = self._loop.call_later(MAX_WAIT_S, self._send_all)

    def close(self) -> None:
        """Drop what is under way."""
        self._queue.clear()
        self._stop_timer()
        for task in self._under_way:
            task.cancel()

    def _look(self) -> None:
        self._looking = False
        if self._queue and not self._under_way:
            self._send_next(self._first if self._has_paused() else MAX_BATCH)

    def _has_paused(self) -> bool:
        return self._loop.time() - self._sent_at > MAX_WAIT_S

    def _send_all(self) -> None:
        self._overdue = None
        while self._queue:
            self._send_next(MAX_BATCH)

    def _send_next(self, size: int) -> None:
        batch, self._queue = self._queue[:size], self._queue[size:]
        if not self._queue:
            self._stop_timer()
        self._sent_at = self._loop.time()
        asked = call_back(self._ask_many, [item for item, _ in batch])
        task = self._loop.create_task(self._send(asked, batch))
        self._under_way[task] = batch
        task.add_done_callback(self._sent)

    def _stop_timer(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    async def _send(self, asked: Coroutine[Any, Any, Sequence[A]] | None, batch: _Batch[I, A]) -> None:
        answers: Sequence[A | EpdError]
        try:
            answers = _lost(batch) if asked is None else await asked
        except EpdError as error:
            answers = [error] * len(batch)
        # Paired before anybody is called: nobody is told twice when their numbers differ.
        for (_, answered), answer in list(zip(batch, answers, strict=True)):
            call_back(answered, answer)

    def _sent(self, task: asyncio.Task[None]) -> None:
        batch = self._under_way.pop(task)
        if not task.cancelled() and task.exception() is not None:
            # A bug: whoever asked must hear of it, or waits until its deadline.
            call_back(task.result)
            for (_, answered), lost in zip(batch, _lost(batch), strict=True):
                call_back(answered, lost)
        if self._queue and not self._under_way:
            self._look()


def _lost(batch: _Batch[I, A]) -> list[EpdError]:
    return [ConsumerUnavailable("the exchange with the EC consumer failed")] * len(batch)
