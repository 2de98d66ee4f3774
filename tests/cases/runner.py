"""Runs one case from set-up to verdict.

Rules of this file: whatever happens, everything that was started is freed; the verdict is a list of failures,
and words outside the vocabulary are failures before anything is started.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.cases.expectations import check_all
from tests.cases.loader import Case
from tests.cases.steps import Steps
from tests.cases.vocabulary import unknown_words
from tests.cases.world import World


async def run_case(case: Case, folder: Path) -> list[str]:
    """Return the failures of a case; its logs are in `folder`."""
    unknown = unknown_words(case)
    if unknown:
        return [f"{case.id}: not in the vocabulary: {', '.join(unknown)}"]
    world = World(case, folder)
    return await run_steps(world, Steps(world))


async def run_steps(world: World, steps: Steps) -> list[str]:
    """Open the world, run its steps, and return what does not hold then."""
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(world.close)
        stack.push_async_callback(steps.close)
        await world.open()
        await stack.enter_async_context(world.stalls.watched())
        await steps.run()
        failures = await check_all(world)
        if failures and world.process is not None:
            failures.append(world.process.log_tail(3000))
        return failures
