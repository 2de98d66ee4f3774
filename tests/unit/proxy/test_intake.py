"""Taking a body in, and who may send one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from epdctl.errors import BodyTooLarge, InvalidRequest, NotAuthenticated
from epdctl.proxy.intake import DataPlaneKeys, read_body

pytestmark = pytest.mark.unit


def arriving(pieces: list[bytes], *, length: int | None, ends: bool = True, **headers: str) -> Any:
    """Return a request whose body arrives in `pieces`, one in each turn of the loop."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    content = StreamReader(protocol, 2**16, loop=loop)
    given = headers | ({} if length is None else {"Content-Length": str(length)})
    request = make_mocked_request("POST", "/", headers=given, payload=content)

    def feed(number: int) -> None:
        if number < len(pieces):
            content.feed_data(pieces[number])
            loop.call_soon(feed, number + 1)
        elif ends:
            content.feed_eof()

    loop.call_soon(feed, 0)
    return request


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    "pieces",
    [[b"a"], [b"ab", b"c" * 70_000, b"d"], [bytes([number]) * 9_000 for number in range(40)]],
    ids=["one", "three", "many"],
)
async def test_a_body_arrives_whole(pieces: list[bytes], told: bool) -> None:
    """With and without a known length, the body is exactly what was sent."""
    whole = b"".join(pieces)
    request = arriving(pieces, length=len(whole) if told else None)

    assert await read_body(request, limit=1_000_000, idle_s=5) == whole


async def test_nothing_unwritten_is_ever_seen() -> None:
    """A body that is shorter than it said has no more bytes than arrived."""
    request = arriving([b"abc"], length=900_000)

    assert await read_body(request, limit=1_000_000, idle_s=5) == b"abc"


@pytest.mark.parametrize("told", [True, False])
async def test_a_body_above_the_limit(told: bool) -> None:
    """It is refused as soon as that is known."""
    request = arriving([b"x" * 600, b"x" * 600], length=1200 if told else None)
    with pytest.raises(BodyTooLarge):
        await read_body(request, limit=1000, idle_s=5)


async def test_a_body_that_stops_arriving() -> None:
    """Silence has a deadline."""
    request = arriving([b"x"], length=1000, ends=False)
    with pytest.raises(InvalidRequest, match="stopped"):
        await read_body(request, limit=1000, idle_s=0.05)


@pytest.mark.parametrize("offered", [None, "", "Bearer", "Bearer three", "Basic one", "one", "Bearer é"])
def test_a_wrong_key(offered: str | None) -> None:
    """Only a bearer key of the list is let in."""
    with pytest.raises(NotAuthenticated):
        DataPlaneKeys(frozenset({"one", "two"}), None).check(offered)


def test_who_is_told_to_the_instances() -> None:
    """The upstream key wins; a checked key ends here; without keys the client's passes."""
    keys = frozenset({"one"})
    DataPlaneKeys(keys, None).check("bearer one")

    assert DataPlaneKeys(keys, "up").upstream_authorization("Bearer one") == "Bearer up"
    assert DataPlaneKeys(keys, None).upstream_authorization("Bearer one") is None
    assert DataPlaneKeys(frozenset(), None).upstream_authorization("Bearer x") == "Bearer x"
