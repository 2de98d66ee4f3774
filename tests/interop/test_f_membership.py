"""f: real vLLM instances register, are evicted when they die, and come back without registering again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.interop.answers import Answer, ask
from tests.interop.compatibility import Row
from tests.interop.deployment import answer_problems
from tests.interop.engines import ENCODE_EXAMPLE, PREFILL_DECODE_EXAMPLE, EngineSpec
from tests.interop.fleet import Fleet
from tests.interop.scenarios import MediaUrl, Scenario, scenarios
from tests.interop.wiring import ADMIN_KEY, register
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

NAME = "f"
ROW = Row(
    letter="f",
    proxy="epdctl, dynamic; killed and restarted",
    encode="vLLM",
    prefill="vLLM",
    ec="ECExampleConnector",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """A proxy with one encoder and one prefill_decode instance, none of them tapped."""

    fleet: Fleet
    proxy: str
    scenarios: dict[str, Scenario]
    plain: dict[str, Answer]

    async def problems(self, name: str) -> list[str]:
        """Send one scenario and compare its answer with the plain vLLM's."""
        return answer_problems(await ask(self.proxy, self.scenarios[name].body), self.plain[name])

    async def lists(self, role: str) -> dict[str, Any]:
        """Return the role's URLs by state."""
        timeout = aiohttp.ClientTimeout(total=5)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{self.proxy}/instances") as answer,
        ):
            return dict((await answer.json())[role])

    async def wait_in(self, role: str, state: str, timeout_s: float) -> None:
        """Wait until the role's only instance is in `state`."""

        async def holds() -> bool:
            return bool((await self.lists(role))[state])

        await wait_until(holds, f"the {role} instance is {state}", timeout_s)

    async def restart(self, spec: EngineSpec) -> None:
        """Start a killed instance again, at the same place."""
        await self.fleet.use(ENCODE_EXAMPLE, PREFILL_DECODE_EXAMPLE)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def members(
    fleet: Fleet, plain: dict[str, dict[str, Answer]], media_url: MediaUrl
) -> AsyncIterator[Members]:
    """The deployment, registered once."""
    encode, consumer = await fleet.use(ENCODE_EXAMPLE, PREFILL_DECODE_EXAMPLE)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.stop_others)
        proxy = await fleet.serve(NAME, "--dynamic-registration", "--fail-threshold", "2", key=ADMIN_KEY)
        await register(proxy.url, "encode", encode.url)
        await register(proxy.url, "prefill_decode", consumer.url)
        yield Members(fleet=fleet, proxy=proxy.url, scenarios=scenarios(NAME, media_url), plain=plain[NAME])


class TestMembership:
    """The registry against real instances that die."""

    async def test_registration_is_idempotent(self, members: Members) -> None:
        """Registering a served instance again answers `registered: false` and changes nothing."""
        url = (await members.lists("encode"))["live"][0]
        before = await members.lists("encode")
        answer = await register(members.proxy, "encode", url)

        assert (False, before) == (answer["registered"], await members.lists("encode"))
        assert await members.problems("one_image") == []

    @pytest.mark.parametrize(
        ("role", "spec", "before", "while_gone", "after"),
        [
            ("encode", ENCODE_EXAMPLE, "two_images", ("no_image", "client_uuid"), "http_image"),
            ("prefill_decode", PREFILL_DECODE_EXAMPLE, "stream", (None, "two_turns"), "processor_options"),
        ],
        ids=["encode", "prefill_decode"],
    )
    async def test_a_killed_instance_comes_back_by_itself(
        self,
        members: Members,
        role: str,
        spec: EngineSpec,
        before: str,
        while_gone: tuple[str | None, str],
        after: str,
    ) -> None:
        """kill -9: evicted, others go on; restarted on the same port: serves again, nobody registered it."""
        assert await members.problems(before) == []

        await members.fleet.kill(spec)
        await members.wait_in(role, "evicted", 30)
        unaffected, refused = while_gone
        if unaffected is not None:
            assert await members.problems(unaffected) == []
        answer = await ask(members.proxy, members.scenarios[refused].body)
        assert answer.status == 503, answer.error

        await members.restart(spec)
        await members.wait_in(role, "live", 60)
        assert await members.problems(after) == []
