"""Whom the proxy serves: holders of keys, as many at once as may be, until it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.proxy_world import PAIR, picture_request, proxy_world, text_request
from tests.stubs.process import wait_until

pytestmark = pytest.mark.e2e


class TestKeys:
    """Data-plane keys."""

    async def test_only_key_holders_are_served(self, tmp_path: Path) -> None:
        """With keys the client's Authorization ends at the proxy and the upstream key goes on."""
        (tmp_path / "keys").write_text("from-file\n\n")
        env = {"EPDCTL_API_KEYS": "one,two", "EPDCTL_UPSTREAM_API_KEY": "up"}
        flags = ("--api-key-file", str(tmp_path / "keys"))
        async with proxy_world(tmp_path / "w", PAIR, *flags, env=env) as world:
            for key in ("one", "two", "from-file"):
                reply = await world.chat(picture_request(), headers={"Authorization": f"Bearer {key}"})
                assert reply.status == 200
            for wrong in (
                {},
                {"Authorization": "Bearer three"},
                {"Authorization": "one"},
                {"X-API-Key": "one"},
            ):
                reply = await world.chat(text_request(), headers=wrong)
                assert (reply.status, reply.code) == (401, "invalid_api_key")
                assert (await world.ask("GET", "/v1/models", headers=wrong)).status == 401
            called = [call for stub in world.stubs.values() for call in stub.chats]
            assert len(called) == 6
            assert {call.header("Authorization") for call in called} == {"Bearer up"}
            assert (await world.ask("GET", "/health")).status == 200


class TestAdmission:
    """How many requests are worked on at once."""

    async def test_a_permit_lives_as_long_as_the_body(self, tmp_path: Path) -> None:
        """Beyond the limit requests wait, beyond the queue they are refused, and each is served in turn."""
        flags = ("--max-concurrent-requests", "1", "--queue-size", "1", "--stage-timeouts", "queue=20")
        async with proxy_world(tmp_path, PAIR, *flags) as world:
            await world["pd0"].set_behaviour({"chat": {"chunks": 10, "gap_ms": 100}})
            first = asyncio.create_task(world.chat(text_request(stream=True)))
            await wait_until(
                lambda: bool(world["pd0"].chats and world["pd0"].chats[0].sent), "the stream runs"
            )
            second = asyncio.create_task(world.chat(text_request()))
            await asyncio.sleep(0)
            refused = await world.chat(text_request())
            while refused.status == 200:
                refused = await world.chat(text_request())

            assert (refused.status, refused.code) == (429, "overloaded")
            assert refused.headers["Retry-After"] == "1"
            assert len(world["pd0"].chats) == 1
            assert (await first).events[-1] == "[DONE]"
            assert (await second).status == 200
            assert (await world.chat(text_request())).status == 200

    async def test_the_wait_is_bounded(self, tmp_path: Path) -> None:
        """A request that waited too long is refused; one whose client left gives up its place."""
        flags = ("--max-concurrent-requests", "1", "--stage-timeouts", "queue=0.3")
        async with proxy_world(tmp_path, PAIR, *flags) as world:
            await world["pd0"].set_behaviour({"chat": {"hang": True}})
            _, blocker = await world.open_raw(text_request())
            await wait_until(lambda: bool(world["pd0"].chats), "the only place is taken")
            reply = await world.chat(text_request())
            assert (reply.status, reply.code) == (429, "overloaded")
            _, waiting = await world.open_raw(text_request())
            waiting.close()
            blocker.close()
            await world["pd0"].set_behaviour({})
            assert (await world.chat(text_request())).status == 200
            await world.wait_quiet()


class TestShutdown:
    """The end of the process."""

    async def test_streams_end_whole_or_with_an_error(self, tmp_path: Path) -> None:
        """Within the grace a stream ends whole; what is left then gets an error event and no [DONE]."""
        roles = PAIR | {"pd1": "prefill_decode"}
        behaviours = {
            "pd0": {"chat": {"chunks": 8, "gap_ms": 100}},
            "pd1": {"chat": {"chunks": 1000, "gap_ms": 100}},
        }
        async with proxy_world(tmp_path, roles, "--shutdown-grace", "2", behaviours=behaviours) as world:
            streams = [asyncio.create_task(world.chat(text_request(stream=True))) for _ in range(2)]
            await wait_until(
                lambda: all(world[name].chats and world[name].chats[0].sent for name in ("pd0", "pd1")),
                "both run",
            )
            assert world.process is not None
            world.process.send_signal(15)
            replies = [await stream for stream in streams]

            assert sorted(reply.events[-1] == "[DONE]" for reply in replies) == [False, True]
            cut = next(reply for reply in replies if reply.events[-1] != "[DONE]")
            assert '"code":"shutting_down"' in cut.events[-1]
            assert await world.process.wait_exit(5) == 0
