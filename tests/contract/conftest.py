"""What runs a scenario of the client for instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from tests.contract.calls import Scenario


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Return what runs a scenario on one kind of event loop, within a deadline."""

    async def within(scenario: Scenario) -> None:
        async with asyncio.timeout(20):
            await scenario()

    def runner(scenario: Scenario) -> None:
        with asyncio.Runner(loop_factory=request.param) as loop:
            loop.run(within(scenario))

    return runner
