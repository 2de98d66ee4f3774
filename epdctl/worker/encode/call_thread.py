"""One thread that runs calls in order, and that nobody has to wait for.

    thread = CallThread("store-read")
    call = thread.submit(function, *arguments)
    call.future                     # of the event loop: the result, or what the function raised
    call.give_up()                  # -> whether it had not begun; one that runs is let run

A call into foreign code may hang. Threads of an executor are waited for when the process ends; this one is
not.

Rules of this file: knows nothing of what it runs.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call that waits for the thread, runs, or has ended."""

    inner: Future[T]
    future: asyncio.Future[T]

    def give_up(self) -> bool:
        """Take the call back; false when it runs already (or has ended)."""
        return self.inner.cancel()


class CallThread:
    """The thread; it ends with `close`, or with the process."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Call[T]:
        """Queue a call; from the event loop."""
        inner: Future[T] = Future()
        self._calls.put((inner, lambda: function(*arguments)))
        return Call(inner, asyncio.wrap_future(inner))

    def close(self) -> None:
        """Let the thread end after what is queued; waits for nothing."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            _carry_out(*call)
            # What a call held must not live until the next one comes.
            del call


def _carry_out(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the call
        future.set_exception(error)
    else:
        future.set_result(result)
