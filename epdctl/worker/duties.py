"""Long-lived tasks of a worker process: none of them ends unnoticed.

    duties = Duties()
    duties.begin(loop_of_mine(), "outbox")      # ends by cancellation only; any other end is a failure
    duties.guard(asyncio.get_running_loop())    # so is what escapes from a callback or a forgotten task
    reason = await duties.failure()             # whoever runs the process ends it then
    await repeated(turns, name="leases")        # for a loop that can be begun anew after a failure

Rules of this file: a failure is logged with its traceback, once, where it happens. What fails for one item
only is answered where the item is known, and does not come here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from epdctl.errors import EpdError

REPEAT_PAUSE_S = 1.0


class Duties:
    """What a process cannot serve without; the first failure counts."""

    def __init__(self) -> None:
        self._failed = asyncio.Event()
        self._reason = ""
        self._log = structlog.get_logger()

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` as a task that only a cancellation may end; whoever begins it cancels it."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    def fail(self, what: str, error: BaseException | None) -> None:
        """Note that `what` cannot go on; the process ends."""
        self._log.error("engine_task_failed", task=what, exc_info=error)
        if not self._failed.is_set():
            self._reason = f"a part of the engine process failed ({what})"
            self._failed.set()

    async def failure(self) -> str:
        """Wait for the first failure; return what an operator is told of it."""
        await self._failed.wait()
        return self._reason

    def guard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let whatever escapes from a callback, or from a task that nobody awaits, be a failure as well."""
        loop.set_exception_handler(self._escaped)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.fail(task.get_name(), task.exception())

    def _escaped(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_work = "handle" in context or isinstance(context.get("future"), asyncio.Task)
        if error is None or isinstance(error, EpdError) or not is_work:
            # A failure that we know, or a result that nobody waited for: neither leaves anything undone.
            self._log.warning("engine_result_unused", reason=str(context.get("message")), error=repr(error))
        else:
            self.fail(str(context.get("message")), error)


async def repeated(work: Callable[[], Awaitable[None]], *, name: str) -> None:
    """Do `work`, which only a cancellation should end, and begin it anew after any other end."""
    while True:
        try:
            await work()
            structlog.get_logger().error("task_ended", task=name, restart_in_s=REPEAT_PAUSE_S)
        except Exception:  # noqa: BLE001 - the supervisor of whatever loop this is
            structlog.get_logger().exception("task_failed", task=name, restart_in_s=REPEAT_PAUSE_S)
        await asyncio.sleep(REPEAT_PAUSE_S)
