"""Many mixed requests while instances die and clients leave: nothing is left over, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.proxy_world import CHAT, ProxyWorld, picture_request, proxy_world, text_request
from tests.stubs.process import wait_until

ROLES = {"e0": "encode", "e1": "encode", "p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
FAULTS = (
    {"fail": "refuse"},
    {"fail": "reset_before_body"},
    {"fail": "reset_after_body"},
    {"status": 500, "text": "x"},
    {"status": 429, "text": "{}"},
    {"delay_ms": 50},
    {},
)
AT_ONCE = 24
MB = 1024 * 1024


async def one_request(world: ProxyWorld, draw: random.Random, number: int) -> str:
    """Send one request of a random kind and return how it ended for the client."""
    kind = draw.choice(("text", "picture", "stream", "pictures", "completion", "leaves"))
    try:
        if kind == "leaves":
            body = picture_request(draw.randint(1, 3), stream=draw.random() < 0.5)
            _, writer = await world.open_raw(body)
            await asyncio.sleep(draw.random() / 50)
            writer.transport.abort()
            return "left"
        if kind == "completion":
            reply = await world.ask("POST", "/v1/completions", json_body={"model": "m", "prompt": "a"})
        else:
            count = {"text": 0, "picture": 1, "stream": 1, "pictures": 4}[kind]
            body = picture_request(count) if count else text_request()
            reply = await world.ask("POST", CHAT, json_body=body | {"stream": kind == "stream"})
    except aiohttp.ClientError as error:
        return f"{number}: {type(error).__name__}"
    return str(reply.status)


async def break_things(world: ProxyWorld, draw: random.Random) -> None:
    """Break and mend a random instance, again and again."""
    while True:
        stub = world[draw.choice(list(ROLES))]
        await stub.set_behaviour({"chat": draw.choice(FAULTS)})
        if draw.random() < 0.3:
            await stub.drop_connections()
        await asyncio.sleep(0.02)
        await stub.set_behaviour({})


async def send_all(world: ProxyWorld, draw: random.Random, total: int) -> Counter[str]:
    """Send `total` requests, some at once, while things break."""
    ends: Counter[str] = Counter()
    numbers = iter(range(total))

    async def client() -> None:
        for number in numbers:
            ends[await one_request(world, draw, number)] += 1

    breaker = asyncio.create_task(break_things(world, draw))
    try:
        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    finally:
        breaker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await breaker
    for stub in world.stubs.values():
        await stub.set_behaviour({})
    await world.wait_quiet(15)
    return ends


async def soak(folder: Path, total: int) -> None:
    """Run the soak and check what is left."""
    draw = random.Random(20_261_129)
    flags = ("--stage-timeouts", "connect=1,encode=5,prefill=5,first_byte=5,idle=5")
    async with proxy_world(folder, ROLES, *flags) as world:
        process = world.process
        assert process is not None
        await send_all(world, draw, total // 5)
        descriptors, memory = process.open_descriptors(), process.rss_bytes()
        ends = await send_all(world, draw, total - total // 5)

        async def all_counted() -> bool:
            return await world.metric("epdctl_requests_total") == total

        await wait_until(all_counted, "every request has an outcome")
        await wait_until(lambda: process.open_descriptors() <= descriptors, "no socket is left")
        assert process.rss_bytes() - memory < 20 * MB
        assert set(ends) <= {"left", "200", "400", "429", "502", "503", "504"}, ends
        assert ends["200"] > total / 4
        assert "Traceback" not in process.stderr
        assert "never retrieved" not in process.stderr
        assert len(world.lines()) == total
        assert (await world.chat(picture_request(2))).status == 200


@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_a_thousand_requests(tmp_path: Path) -> None:
    """Counters, sockets and memory are where they were, and every request has one outcome."""
    await soak(tmp_path, 1_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_twenty_thousand_requests(tmp_path: Path) -> None:
    """The same over twenty thousand requests."""
    await soak(tmp_path, 20_000)
