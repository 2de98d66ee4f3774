"""Long-lived tasks: none of them ends unnoticed."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from epdctl.errors import ConsumerUnavailable
from epdctl.worker import duties as duties_module
from epdctl.worker.duties import Duties, repeated

pytestmark = pytest.mark.unit


async def _fails() -> None:
    raise RuntimeError("a bug")


async def _ends() -> None:
    return None


@pytest.mark.parametrize("work", [_fails, _ends])
async def test_a_duty_that_ends_is_a_failure(work: object) -> None:
    """Whether it raises or just returns: whoever runs the process hears the name of what has ended."""
    with capture_logs() as logs:
        duties = Duties()
        duties.begin(work(), "outbox")  # type: ignore[operator]
        reason = await asyncio.wait_for(duties.failure(), 5)

    assert reason == "a part of the engine process failed (outbox)"
    assert [(line["event"], line["task"], line["log_level"]) for line in logs] == [
        ("engine_task_failed", "outbox", "error")
    ]


async def test_a_cancelled_duty_is_no_failure() -> None:
    """What its owner ends by a cancellation has not failed."""
    duties = Duties()
    task = duties.begin(asyncio.Event().wait(), "outbox")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(duties.failure(), 0.01)


async def test_what_escapes_is_a_failure_unless_it_has_a_name() -> None:
    """A bug in a callback or in a task that nobody awaits counts; a known failure, or an unused result of a
    future, does not."""
    loop = asyncio.get_running_loop()
    duties, failures = Duties(), []

    def asked(context: dict[str, object]) -> bool:
        failures.clear()
        duties.fail = lambda what, error: failures.append(error)  # type: ignore[method-assign, assignment]
        duties._escaped(loop, context)
        return bool(failures)

    task = loop.create_task(_ends())
    await task
    handle, future = loop.call_soon(lambda: None), loop.create_future()
    bug, known = RuntimeError("a bug"), ConsumerUnavailable("silent")

    assert asked({"message": "m", "exception": bug, "handle": handle})
    assert asked({"message": "m", "exception": bug, "future": task})
    assert not asked({"message": "m", "exception": known, "future": task})
    assert not asked({"message": "m", "exception": bug, "future": future})
    assert not asked({"message": "m"})


async def test_a_repeated_loop_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop whose failure leaves nothing undone goes on after it, and the failure is logged."""
    monkeypatch.setattr(duties_module, "REPEAT_PAUSE_S", 0.001)
    begun = 0
    went_on = asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise RuntimeError("a bug")
        if begun == 2:
            return
        went_on.set()
        await asyncio.Event().wait()

    with capture_logs() as logs:
        task = asyncio.create_task(repeated(work, name="leases"))
        await asyncio.wait_for(went_on.wait(), 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert [(line["event"], line["task"]) for line in logs] == [
        ("task_failed", "leases"),
        ("task_ended", "leases"),
    ]
