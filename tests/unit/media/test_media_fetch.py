"""Fetching media: limits, redirects, and names that resolve to inner addresses."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epdctl.errors import EpdError, InvalidRequest, MediaUnavailable, Overloaded, UnsupportedMedia
from epdctl.worker.media import MediaFetcher, MediaLimits, decode_data_url
from epdctl.worker.media_address import FetchRules
from epdctl.worker.media_budget import MediaBudget

pytestmark = [pytest.mark.unit, pytest.mark.worker]

Build = Callable[..., MediaFetcher]
HOST = "pictures.example"


class Origin:
    """A web server that does as its path says, and counts what reaches it."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        self.requests.append(request)
        what = request.match_info["what"]
        if what == "ok":
            return web.Response(body=b"picture")
        if what == "to":
            raise web.HTTPFound(request.query["url"])
        if what == "loop":
            raise web.HTTPFound("/loop")
        if what == "slow":
            await asyncio.sleep(30)
        if what == "gzip":
            return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})
        if what == "endless":
            return await self._endless(request, bytes(65536), pause_s=0)
        if what == "trickle":
            return await self._endless(request, b"x", pause_s=0.02)
        if what == "claims-much":
            return web.Response(body=b"x", headers={"Content-Length": str(10**12)})
        if what == "wrong-type":
            return web.Response(body=b"picture", content_type="text/html")
        return web.Response(status=404, body=b"secret page")

    async def _endless(self, request: web.Request, piece: bytes, *, pause_s: float) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(piece)
                await asyncio.sleep(pause_s)
        except ConnectionError:
            return response


@pytest.fixture
async def origin() -> AsyncIterator[tuple[Origin, int]]:
    """Start the server; give it and its port."""
    served = Origin()
    app = web.Application()
    app.router.add_get("/{what}", served.answer)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    assert server.port is not None
    yield served, server.port
    await server.close()


@pytest.fixture
async def fetcher() -> AsyncIterator[Build]:
    """Build fetchers whose names resolve as the test says."""
    built: list[MediaFetcher] = []
    with ThreadPoolExecutor(2) as threads:

        def build(answers: Sequence[Sequence[str]] = (["127.0.0.1"],), **limits: Any) -> MediaFetcher:
            left = list(answers)

            async def lookup(host: str, port: int) -> Sequence[str]:
                return left.pop(0) if len(left) > 1 else left[0]

            fields = {"max_bytes": 1000, "timeout_s": 5.0, **limits}
            built.append(MediaFetcher(MediaLimits(**fields), threads, lookup=lookup))
            return built[-1]

        yield build
        for one in built:
            await one.close()


LISTED = FetchRules(allowed_hosts=(HOST,))


async def test_picture_of_an_allowed_host_is_fetched(origin: tuple[Origin, int], fetcher: Build) -> None:
    """A host on the list may be private; its bytes are returned as they are."""
    _, port = origin

    assert await fetcher(rules=LISTED).fetch(f"http://{HOST}:{port}/ok") == b"picture"


async def test_name_that_resolves_to_an_inner_address_is_not_connected_to(
    origin: tuple[Origin, int], fetcher: Build
) -> None:
    """Without a list a name with an inner address is refused, and nothing reaches the server there."""
    served, port = origin

    with pytest.raises(MediaUnavailable):
        await fetcher().fetch(f"http://{HOST}:{port}/ok")

    assert served.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "127.1", "2130706433"])
async def test_inner_address_in_the_url_is_not_connected_to(
    origin: tuple[Origin, int], fetcher: Build, host: str
) -> None:
    """An address in the URL, which is never looked up, is refused like a name that leads there."""
    served, port = origin

    with pytest.raises(MediaUnavailable):
        await fetcher().fetch(f"http://{host}:{port}/ok")

    assert served.requests == []


async def test_name_that_changes_its_address_gains_nothing(
    origin: tuple[Origin, int], fetcher: Build
) -> None:
    """What is connected to is what was checked: a second look-up with another answer never happens."""
    served, port = origin
    rebinding = fetcher(answers=(["192.88.99.1"], ["127.0.0.1"]), timeout_s=0.5)

    with pytest.raises(MediaUnavailable):
        await rebinding.fetch(f"http://{HOST}:{port}/ok")

    assert served.requests == []


async def test_one_inner_address_among_public_ones_refuses_the_name(
    origin: tuple[Origin, int], fetcher: Build
) -> None:
    """A name with a public and an inner address is refused: no address of it is connected to."""
    served, port = origin

    for addresses in (["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "8.8.8.8"], ["8.8.8.8", "::1"]):
        with pytest.raises(MediaUnavailable, match="--allowed-media-domains"):
            await fetcher(answers=[addresses]).fetch(f"http://{HOST}:{port}/ok")

    assert served.requests == []


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/ok",
        "http://[::ffff:127.0.0.1]:{port}/ok",
        "http://169.254.169.254/latest",
        "http://another.example:{port}/ok",
        "//another.example:{port}/ok",
    ],
)
async def test_redirect_is_checked_like_a_first_url(
    origin: tuple[Origin, int], fetcher: Build, target: str
) -> None:
    """A redirect to an inner address is refused, though the first host was allowed."""
    served, port = origin
    url = target.format(port=port)

    with pytest.raises(MediaUnavailable):
        await fetcher(rules=LISTED).fetch(f"http://{HOST}:{port}/to?url={url}")

    assert [request.path for request in served.requests] == ["/to"]


async def test_redirect_to_another_scheme_is_refused(origin: tuple[Origin, int], fetcher: Build) -> None:
    """A redirect cannot reach local files or other protocols."""
    _, port = origin

    with pytest.raises(UnsupportedMedia):
        await fetcher(rules=LISTED).fetch(f"http://{HOST}:{port}/to?url=file:///etc/passwd")


async def test_redirects_are_followed_up_to_their_limit(origin: tuple[Origin, int], fetcher: Build) -> None:
    """Few redirects are followed, a loop of them ends at the limit."""
    served, port = origin
    media = fetcher(rules=LISTED, max_redirects=2)

    assert await media.fetch(f"http://{HOST}:{port}/to?url=/ok") == b"picture"
    with pytest.raises(MediaUnavailable, match=r"more than 2 times \(--media-redirects\)"):
        await media.fetch(f"http://{HOST}:{port}/loop")

    assert len(served.requests) == 2 + 3


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("missing", "status 404"),
        ("endless", "larger than 1000 bytes (--max-media-bytes)"),
        ("claims-much", "larger than 1000 bytes (--max-media-bytes)"),
        ("slow", "within 0.3 s (--media-timeout)"),
        ("trickle", "within 0.3 s (--media-timeout)"),
        ("gzip", "compressed"),
    ],
)
async def test_fetch_that_cannot_end_well_fails_in_time(
    origin: tuple[Origin, int], fetcher: Build, path: str, text: str
) -> None:
    """An error status, too many bytes and a slow server fail within the limits, and say which one."""
    _, port = origin

    with pytest.raises(MediaUnavailable, match=re.escape(text)) as failure:
        await fetcher(rules=LISTED, timeout_s=0.3 if path in ("slow", "trickle") else 5.0).fetch(
            f"http://{HOST}:{port}/{path}?token=secret"
        )

    assert "secret" not in failure.value.message


async def test_type_that_a_server_claims_says_nothing(origin: tuple[Origin, int], fetcher: Build) -> None:
    """What the bytes are is found out from the bytes, as vLLM does."""
    _, port = origin

    assert await fetcher(rules=LISTED).fetch(f"http://{HOST}:{port}/wrong-type") == b"picture"


async def test_look_up_that_hangs_ends_in_time() -> None:
    """The time limit holds for the look-up of the name too."""

    async def hang(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    with ThreadPoolExecutor(1) as threads:
        media = MediaFetcher(MediaLimits(max_bytes=10, timeout_s=0.2), threads, lookup=hang)
        try:
            with pytest.raises(MediaUnavailable, match=r"within 0\.2 s"):
                await media.fetch(f"http://{HOST}/x")
        finally:
            await media.close()


async def test_host_that_is_not_there_fails_without_details(fetcher: Build) -> None:
    """A refused connection says that, and names no address."""
    with pytest.raises(MediaUnavailable) as failure:
        await fetcher(rules=LISTED).fetch(f"http://{HOST}:1/x")

    assert failure.value.message == "the media URL could not be fetched"


async def test_request_carries_nothing_of_ours(origin: tuple[Origin, int], fetcher: Build) -> None:
    """No cookies, no credentials, no compression are offered to the server."""
    served, port = origin
    await fetcher(rules=LISTED).fetch(f"http://{HOST}:{port}/ok")

    names = {name.lower() for name in served.requests[0].headers}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert served.requests[0].headers["Accept-Encoding"] == "identity"


def data_url(data: bytes, head: str = "data:image/png;base64") -> str:
    """Return `data` as a data URL."""
    return f"{head},{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("head", ["data:image/png;base64", "data:;base64", "DATA:image/png;BASE64"])
async def test_data_url_is_decoded(fetcher: Build, head: str) -> None:
    """The bytes of a base64 data URL are returned, whatever type it claims."""
    assert await fetcher().fetch(data_url(b"\x00picture", head)) == b"\x00picture"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("data:image/png;base64,@@@not-base64@@@", MediaUnavailable),
        ("data:image/png;base64,QUJ D", MediaUnavailable),
        ("data:image/png;base64,QUJ", MediaUnavailable),
        ("data:image/png;base64,QUÄ=", MediaUnavailable),
        ("data:image/png,plain", UnsupportedMedia),
        ("data:image/png;base64", InvalidRequest),
        (data_url(bytes(1001)), MediaUnavailable),
    ],
)
def test_bad_data_url_is_refused(url: str, kind: type[EpdError]) -> None:
    """Broken base64, other encodings and too much data are refused."""
    with pytest.raises(kind):
        decode_data_url(url, 1000)


def test_empty_data_url_is_no_bytes() -> None:
    """Zero bytes are decoded as zero bytes; the decoder says what is wrong with them."""
    assert decode_data_url("data:image/png;base64,", 1000) == b""


@pytest.mark.parametrize("kind", ["data", "file", "http"])
async def test_bytes_are_counted_before_they_are_kept(
    origin: tuple[Origin, int], fetcher: Build, tmp_path: Path, kind: str
) -> None:
    """Whatever the URL, all bytes are counted, and a refusal of the counter ends the fetch."""
    _, port = origin
    (tmp_path / "a.png").write_bytes(b"picture")
    url = {
        "data": data_url(b"picture"),
        "file": f"file://{tmp_path}/a.png",
        "http": f"http://{HOST}:{port}/ok",
    }[kind]
    media = fetcher(rules=LISTED, local_path=tmp_path)
    taken: list[int] = []

    def refuse(nbytes: int) -> None:
        raise Overloaded("full")

    assert await media.fetch(url, taken.append) == b"picture"
    assert 7 <= sum(taken) <= 9  # the padding of base64 may count
    with pytest.raises(Overloaded):
        await media.fetch(url, refuse)


async def test_endless_answer_is_counted_as_it_arrives(origin: tuple[Origin, int], fetcher: Build) -> None:
    """A body without a length is refused at the first byte that finds no room, not at its end."""
    _, port = origin
    with MediaBudget(200_000).share() as share:
        with pytest.raises(MediaUnavailable, match="--media-memory-bytes"):
            await fetcher(rules=LISTED, max_bytes=10**9).fetch(f"http://{HOST}:{port}/endless", share.take)
        assert 0 < share.held <= 200_000
