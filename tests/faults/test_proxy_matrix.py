"""Every stage, broken in every way: the client's status and code, and nothing left behind.

Each case runs beside a stream that was opened before the fault: that one must not notice anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.proxy_world import SPLIT, ProxyWorld, Reply, picture_request, proxy_world, text_request
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.asyncio(loop_scope="module")]

SHORT = (
    "--stage-timeouts",
    "connect=0.5,encode=0.6,prefill=0.6,first_byte=0.6,idle=0.6",
    "--decode-retries",
    "0",
)
STREAM = {"chunks": 12, "gap_ms": 60}

WRONG_INDICES = {
    "json": {
        "id": "x",
        "choices": [],
        "ec_transfer_params": {"a": {"item_indices": [5], "metadata": {"image_grid_thw": [1, 2, 2]}}},
    }
}
TOLD = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
FULL = {"error": {"message": "no room", "type": "upstream_error", "param": None, "code": "consumer_full"}}

FAULTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "refuse": ({"fail": "refuse"}, 502, "upstream_unreachable"),
    "hang": ({"hang": True}, 504, "upstream_timeout"),
    "hang after headers": ({"headers_then_hang": True}, 504, "upstream_timeout"),
    "reset before the body is read": ({"fail": "reset_before_body"}, 502, "upstream_unreachable"),
    "reset before headers": ({"fail": "reset_after_body"}, 502, "upstream_unreachable"),
    "reset mid-body": ({"fail": "reset_after_headers"}, 502, "upstream_unreachable"),
    "400": ({"status": 400, "json": TOLD}, 400, "as sent"),
    "429": ({"status": 429, "json": TOLD, "headers": {"Retry-After": "7"}}, 429, "as sent"),
    "500": ({"status": 500, "json": TOLD}, 502, "upstream_failed"),
    "503": ({"status": 503, "json": TOLD, "headers": {"Retry-After": "7"}}, 503, "upstream_busy"),
    "503 of a worker of ours": (
        {"status": 503, "json": FULL, "headers": {"Retry-After": "7"}},
        503,
        "consumer_full",
    ),
    "malformed JSON": ({"status": 200, "text": '{"choices": ['}, 502, "upstream_protocol"),
    "redirect": ({"status": 302, "text": ""}, 502, "upstream_protocol"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["e_p_d", "e_pd"])
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProxyWorld]:
    """A fleet with one instance of each role, so that nothing can be retried elsewhere."""
    roles = SPLIT if request.param == "e_p_d" else {"e0": "encode", "d0": "prefill_decode"}
    folder: Path = tmp_path_factory.mktemp("matrix")
    async with proxy_world(folder, roles, *SHORT) as it:
        yield it


async def open_stream(world: ProxyWorld) -> asyncio.Task[Reply]:
    """Start a stream that takes longer than any case, and return once decode is sending."""
    await world["d0"].set_behaviour({"chat": STREAM})
    before = len(world["d0"].chats)
    task = asyncio.create_task(world.chat(text_request(stream=True)))
    await wait_until(lambda: len(world["d0"].chats) > before and bool(world["d0"].chats[-1].sent), "a stream")
    return task


async def case(world: ProxyWorld, stage: str, behaviour: dict[str, Any], body: dict[str, Any]) -> Reply:
    """Break `stage`, send `body`, and check that the stream beside it and the counters are untouched."""
    await world.reset()
    stream = await open_stream(world)
    sent = world["d0"].chats[-1]
    if stage != "d0":
        await world["d0"].set_behaviour({})
    if behaviour == {"fail": "refuse"}:
        # A closed listener would take the stream along, so this stage refuses by being somewhere else.
        reply = await refused(world, stage, body, stream)
    else:
        await world[stage].set_behaviour({"chat": behaviour})
        reply = await world.chat(body)
    beside = await stream
    assert (beside.status, beside.failure, beside.body) == (200, None, sent.sent)
    assert beside.events[-1] == "[DONE]"
    await world.reset()
    await world.wait_quiet()
    assert (await world.chat(body)).status == 200
    return reply


async def refused(world: ProxyWorld, stage: str, body: dict[str, Any], stream: asyncio.Task[Reply]) -> Reply:
    """Let `stage` refuse connections; decode does so only after the stream beside it has ended."""
    if stage == "d0":
        await stream
    await world[stage].set_behaviour({"chat": {"fail": "refuse"}})
    return await world.chat(body)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", ["e0", "p0", "d0"])
async def test_a_broken_stage(world: ProxyWorld, stage: str, fault: str) -> None:
    """The client learns the truth before anything was sent to it, and nobody else notices."""
    if stage not in world.stubs:
        stage = "d0"
    behaviour, status, code = FAULTS[fault]
    reply = await case(world, stage, behaviour, picture_request())

    assert reply.status == status, reply.body
    if code == "as sent":
        assert reply.json == TOLD
    else:
        assert reply.code == code
        assert reply.json["error"]["type"] == "upstream_error"
    if behaviour.get("headers"):
        assert reply.headers["Retry-After"] == "7"
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize("fault", ["hang", "500", "malformed JSON", "reset before headers"])
async def test_a_streaming_client_gets_the_true_status(world: ProxyWorld, fault: str) -> None:
    """Hazard 39: an encoder's failure is never a 200 with a truncated stream."""
    behaviour, status, code = FAULTS[fault]
    reply = await case(world, "e0", behaviour, picture_request(stream=True))

    assert (reply.status, reply.code) == (status, code)


async def test_wrong_positions_from_an_encoder(world: ProxyWorld) -> None:
    """An encoder that reports a position it was not asked for is refused, and decode is not asked."""
    reply = await case(world, "e0", WRONG_INDICES, picture_request())

    assert (reply.status, reply.code) == (502, "upstream_protocol")


@pytest.mark.parametrize("stage", ["e0", "p0", "d0"])
async def test_a_slow_stage(world: ProxyWorld, stage: str) -> None:
    """Slow within the deadline is no fault."""
    reply = await case(world, stage if stage in world.stubs else "d0", {"delay_ms": 300}, picture_request())

    assert reply.status == 200


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ({"sse": ["data: {}\n\n", "data: {}\n\n"], "end": "reset"}, "upstream_unreachable"),
        ({"sse": ["data: {}\n\n"], "end": "clean"}, "upstream_protocol"),
        ({"sse": ["data: {}\n\n", 'data: {"cut'], "end": "reset"}, "upstream_unreachable"),
        ({"sse": ["data: {}\n\n"], "end": "hang"}, "upstream_timeout"),
    ],
)
async def test_decode_dies_within_its_stream(world: ProxyWorld, behaviour: dict[str, Any], code: str) -> None:
    """The stream ends with one error event and no [DONE], and the connection is not used again."""
    reply = await case(world, "d0", behaviour, picture_request(stream=True))

    assert reply.status == 200
    assert "[DONE]" not in reply.events
    assert f'"code":"{code}"' in reply.events[-1]
    assert sum('"error"' in event for event in reply.events) == 1
    line = await world.line_of(reply.headers["x-request-id"])
    assert (line["outcome"], line["error_code"]) == ("aborted", code)


async def test_decode_dies_after_its_last_word(world: ProxyWorld) -> None:
    """A stream that has said [DONE] is whole, whatever happens to its connection."""
    reply = await case(world, "d0", {"chunks": 3, "end": "reset"}, picture_request(stream=True))

    assert (reply.status, reply.events[-1], reply.failure) == (200, "[DONE]", None)
