"""The proxy's HTTP edge: headers, bodies, limits, endpoints, and what a client of OpenAI's library sees."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
import pytest_asyncio

from tests.e2e.proxy_world import (
    ADMIN_KEY,
    CHAT,
    PAIR,
    PICTURE,
    SPLIT,
    ProxyWorld,
    picture_request,
    proxy_world,
    text_request,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProxyWorld]:
    """One fleet for tests that leave it as it was."""
    flags = ("--max-body-bytes", "3000000", "--max-items", "3")
    async with proxy_world(tmp_path_factory.mktemp("edge"), SPLIT, *flags) as it:
        yield it


@pytest_asyncio.fixture(loop_scope="module")
async def world(running: ProxyWorld) -> ProxyWorld:
    """That fleet as if nothing had happened."""
    await running.reset()
    return running


async def raw(world: ProxyWorld, data: bytes) -> bytes:
    """Send bytes on a connection of their own and return what comes until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(data)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


class TestHeaders:
    """What crosses, and what does not."""

    async def test_traces_and_ids_reach_every_stage(self, world: ProxyWorld) -> None:
        """Trace headers, the request id and, without data-plane keys, Authorization pass."""
        headers = {
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "tracestate": "a=b",
            "baggage": "c=d",
            "X-Request-Id": "rid-1",
            "Authorization": "Bearer client-key",
            "X-Secret-Route": "evil",
        }
        reply = await world.chat(picture_request(), headers=headers)

        assert reply.headers["x-request-id"] == "rid-1"
        for stub in world.stubs.values():
            call = stub.chats[0]
            assert all(
                call.header(name) == headers[name] for name in ("traceparent", "tracestate", "baggage")
            )
            assert call.header("Authorization") == "Bearer client-key"
            assert (call.header("X-Request-ID") or "").startswith("rid-1")
            assert call.header("X-Secret-Route") is None
            assert call.header("Host") == stub.hostport
        assert (world["e0"].chats[0].header("X-Request-ID") or "").startswith("rid-1:0:")

    @pytest.mark.parametrize("offered", ["", "a b", "../../etc", "a" * 129, "%0d%0aX-Evil: 1"])
    async def test_an_odd_request_id_is_replaced(self, world: ProxyWorld, offered: str) -> None:
        """Only short and plain ids are taken over."""
        reply = await world.chat(text_request(), headers={"X-Request-Id": offered})

        assert reply.status == 200
        assert reply.headers["x-request-id"] != offered
        assert len(reply.headers["x-request-id"]) == 32

    async def test_instance_headers_pass_and_connection_headers_do_not(self, world: ProxyWorld) -> None:
        """Hop-by-hop headers end at the proxy, which names itself without a version."""
        headers = {"Connection": "close, X-Drop", "X-Drop": "1", "Keep-Alive": "timeout=1", "X-Ok": "1"}
        await world["d0"].set_behaviour({"chat": {"headers": headers}})
        reply = await world.chat(text_request())

        assert reply.headers["X-Ok"] == "1"
        assert not {"Keep-Alive", "X-Drop"} & reply.headers.keys()
        assert reply.headers["Server"] == "epdctl"
        assert (await world.ask("POST", CHAT, data=b"{")).headers["Server"] == "epdctl"

    async def test_an_old_client_is_served(self, world: ProxyWorld) -> None:
        """HTTP/1.0: no chunks, and the end of a stream is the end of the connection."""
        body = json.dumps(text_request(stream=True)).encode()
        head = b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
        answer = await raw(world, head + body)
        head, _, events = answer.partition(b"\r\n\r\n")

        assert b"chunked" not in head.lower()
        assert events == world["d0"].chats[0].sent

    async def test_several_requests_on_one_connection(self, world: ProxyWorld) -> None:
        """Whole and streamed answers leave the connection usable; pipelined requests keep their order."""
        requests = b""
        for number, body in enumerate([text_request(), text_request(stream=True), picture_request()]):
            data = json.dumps(body).encode()
            last = b"Connection: close\r\n" if number == 2 else b""
            requests += (
                b"POST %b HTTP/1.1\r\nHost: x\r\nX-Request-Id: r%d\r\n%bContent-Length: %d\r\n\r\n%b"
                % (
                    CHAT.encode(),
                    number,
                    last,
                    len(data),
                    data,
                )
            )
        answer = await raw(world, requests)

        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert [answer.index(b"x-request-id: r%d" % n) for n in range(3)] == sorted(
            answer.index(b"x-request-id: r%d" % n) for n in range(3)
        )

    async def test_nothing_private_is_logged(self, world: ProxyWorld) -> None:
        """Prompts, media, keys and query strings appear in no log line, however a request ends."""
        marked = {"Authorization": "Bearer MARKKEY", "X-API-Key": "MARKADMIN"}
        body = picture_request()
        body["messages"][0]["content"][1]["text"] = "MARKPROMPT"
        for behaviour in (
            {},
            {"chat": {"status": 500, "text": "MARKBODY"}},
            {"chat": {"fail": "reset_after_body"}},
        ):
            await world["p0"].set_behaviour(behaviour)
            await world.chat(body, headers=marked)
        await world.ask("POST", CHAT, data=b'{"messages": MARKPROMPT')
        await world.ask("GET", "/instances?key=MARKQUERY", headers=marked)

        assert world.process is not None
        assert "MARK" not in world.process.stderr
        assert PICTURE[30:60] not in world.process.stderr


class TestBodies:
    """What a body may be."""

    @pytest.mark.parametrize(
        "data", [b"", b"null", b"[]", b"1", b"{", b'{"messages":NaN}', b'{"a":' + b"[" * 100_000, b"\xff\xfe"]
    )
    async def test_a_body_that_is_no_request(self, world: ProxyWorld, data: bytes) -> None:
        """Malformed bodies are refused by the proxy itself."""
        reply = await world.ask("POST", CHAT, data=data)

        assert (reply.status, reply.code) == (400, "invalid_request")
        assert not world["d0"].chats

    async def test_too_large(self, world: ProxyWorld) -> None:
        """A body above the limit is 413, whether its length was announced or not; the next is served."""
        large = b" " * 3_000_001  # the client wants large bodies as files

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 100_000

        assert (await world.ask("POST", CHAT, data=io.BytesIO(large))).code == "body_too_large"
        assert (await world.ask("POST", CHAT, data=chunks())).status == 413
        packed = gzip.compress(large)
        reply = await world.ask("POST", CHAT, data=packed, headers={"Content-Encoding": "gzip"})
        assert reply.status == 413
        assert (await world.chat(text_request())).status == 200

    async def test_packed_and_chunked_bodies(self, world: ProxyWorld) -> None:
        """A compressed body and one in chunks are read like any other."""
        data = json.dumps(picture_request()).encode()

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, len(data), 50):
                yield data[at : at + 50]

        packed = {"Content-Encoding": "gzip"}
        assert (await world.ask("POST", CHAT, data=gzip.compress(data), headers=packed)).status == 200
        assert (await world.ask("POST", CHAT, data=chunks())).status == 200
        assert (await world.ask("POST", CHAT, data=b"no gzip", headers=packed)).status == 400

    async def test_a_large_picture_arrives_whole(self, world: ProxyWorld) -> None:
        """Megabytes reach the encoder byte for byte, and none of them the language stages."""
        url = PICTURE + "A" * 2_500_000
        body = text_request(
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        )
        reply = await world.ask("POST", CHAT, data=io.BytesIO(json.dumps(body).encode()))

        assert reply.status == 200
        assert world["e0"].chats[0].json["messages"][0]["content"][0]["image_url"]["url"] == url
        assert len(world["p0"].chats[0].body) < 2000

    async def test_limits_of_items(self, world: ProxyWorld) -> None:
        """More media than allowed are refused, with the limit named."""
        assert (await world.chat(picture_request(3))).status == 200
        reply = await world.chat(picture_request(4))

        assert (reply.status, reply.json["error"]["param"]) == (400, "messages")

    async def test_embeddings_of_a_client(self, world: ProxyWorld) -> None:
        """Hazard 36: embeddings are refused, and a client's transfer parameters never arrive anywhere."""
        part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": "x"}
        refused = await world.chat(text_request(messages=[{"role": "user", "content": [part]}]))
        assert (refused.status, refused.code) == (400, "unsupported_media")

        before = await world.metric("epdctl_dropped_client_params_total")
        evil = {"remote_host": "169.254.169.254", "consumer_zmq": "tcp://169.254.169.254:1"}
        body = picture_request(kv_transfer_params=evil, ec_transfer_params=evil)
        assert (await world.chat(body)).status == 200
        for stub in world.stubs.values():
            assert b"169.254" not in stub.chats[0].body
        assert await world.metric("epdctl_dropped_client_params_total") == before + 2


class TestEndpoints:
    """What is served, and what is not."""

    SERVED = (
        ("POST", CHAT, 200),
        ("POST", "/v1/completions", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/health", 200),
        ("GET", "/ready", 200),
        ("GET", "/metrics", 200),
        ("GET", CHAT, 405),
        ("GET", "/start_profile", 405),
        ("POST", "/start_profile", 403),
        ("POST", "/v1/embeddings", 501),
        ("POST", "/v1/responses", 501),
        ("POST", "/v1/audio/transcriptions", 501),
        ("GET", "/v1/anything", 501),
        ("DELETE", "/v1/models", 405),
        ("GET", "/nope", 404),
        ("GET", "/v1/x%2f..%2f..%2finstances", 404),
    )

    @pytest.mark.parametrize(("roles", "topology"), [(PAIR, "e_pd"), (SPLIT, "e_p_d")])
    async def test_the_table(self, tmp_path: Path, roles: dict[str, str], topology: str) -> None:
        """Hazard 13: each endpoint on each topology has one answer; what is not served names the topology."""
        async with proxy_world(tmp_path, roles) as world:
            body = text_request(prompt="a")
            for method, path, status in self.SERVED:
                reply = await world.ask(method, path, json_body=body if method == "POST" else None)
                assert (method, path, reply.status) == (method, path, status)
                if status == 501:
                    assert reply.code == "unsupported_endpoint"
                    assert topology in reply.json["error"]["message"]
                if status >= 400:
                    assert reply.headers["x-request-id"]

    async def test_models_are_a_union(self, tmp_path: Path) -> None:
        """Each model of the instances that answer users is listed once, with the card of its instance."""
        behaviours = {
            "e0": {"models": ["a", "b"]},
            "pd0": {"models": ["a"]},
            "pd1": {"models": ["a", "b"]},
        }
        roles = PAIR | {"pd1": "prefill_decode"}
        async with proxy_world(tmp_path, roles, behaviours=behaviours) as world:
            cards = (await world.ask("GET", "/v1/models")).json["data"]
            assert [card["id"] for card in cards] == ["a", "b"]
            assert cards[0]["owned_by"] == "vllm"
            for _ in range(2):
                assert (await world.chat(picture_request(model="b"))).status == 200
            assert (len(world["pd0"].chats), len(world["pd1"].chats)) == (0, 2)
            unknown = await world.chat(text_request(model="c"))
            assert (unknown.status, unknown.code) == (404, "model_not_found")
            assert "a, b" in unknown.json["error"]["message"]

    async def test_profiles_start_on_every_instance(self, world: ProxyWorld) -> None:
        """Profiling needs the admin key and reaches all instances."""
        headers = {"X-API-Key": ADMIN_KEY}
        for path in ("/start_profile", "/stop_profile"):
            reply = await world.ask("POST", path, json_body={}, headers=headers)
            assert reply.status == 200
            assert {result["status"] for result in reply.json["results"]} == {200}
            assert all(len(stub.calls_to(path)) == 1 for stub in world.stubs.values())


class TestOpenAiClient:
    """The official Python client."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def client(self, world: ProxyWorld) -> AsyncIterator[openai.AsyncOpenAI]:
        """A client of the running fleet."""
        async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="k", max_retries=0) as it:
            yield it

    PICTURES: ClassVar[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": PICTURE}},
                {"type": "text", "text": "What is shown?"},
            ],
        }
    ]

    async def test_a_picture(self, client: openai.AsyncOpenAI) -> None:
        """A chat about a picture answers."""
        answer = await client.chat.completions.create(model="m", messages=self.PICTURES)

        assert answer.choices[0].message.content

    async def test_a_stream(self, client: openai.AsyncOpenAI) -> None:
        """A streamed chat gives its chunks and the usage."""
        stream = await client.chat.completions.create(
            model="m", messages=self.PICTURES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert chunks[-1].usage is not None

    async def test_a_completion_and_models(self, client: openai.AsyncOpenAI) -> None:
        """The other endpoints work with it too."""
        answer = await client.completions.create(model="m", prompt="hello")
        assert answer.choices
        assert [model async for model in client.models.list()] == []

    async def test_the_request_id(self, client: openai.AsyncOpenAI) -> None:
        """The raw response carries the request id."""
        response = await client.chat.completions.with_raw_response.create(model="m", messages=self.PICTURES)

        assert len(response.request_id or "") == 32

    @pytest.mark.parametrize(
        ("behaviour", "kind"),
        [
            ({"status": 400, "json": {"error": {"message": "too long"}}}, openai.BadRequestError),
            ({"status": 429, "json": {"error": {"message": "busy"}}}, openai.RateLimitError),
            ({"status": 500, "text": "x"}, openai.InternalServerError),
        ],
    )
    async def test_error_classes(
        self, world: ProxyWorld, client: openai.AsyncOpenAI, behaviour: dict[str, Any], kind: type[Exception]
    ) -> None:
        """Errors arrive as the classes that users catch."""
        await world["p0"].set_behaviour({"chat": behaviour})
        with pytest.raises(kind):
            await client.chat.completions.create(model="m", messages=self.PICTURES)

    async def test_our_own_errors(self, client: openai.AsyncOpenAI) -> None:
        """The envelope's code, type and param are read by the client."""
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=self.PICTURES * 4)

        assert (caught.value.code, caught.value.param) == ("invalid_request", "messages")

    async def test_retries_of_the_client(self, world: ProxyWorld) -> None:
        """What the proxy could not cure, the client's own retries do."""
        await world["p0"].set_behaviour({"chat": {"sequence": [{"status": 500, "text": "x"}]}})
        async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="k", max_retries=2) as client:
            answer = await client.chat.completions.create(model="m", messages=self.PICTURES)

        assert answer.choices

    async def test_an_error_within_a_stream(self, world: ProxyWorld, client: openai.AsyncOpenAI) -> None:
        """A stream that dies raises instead of ending."""
        await world["d0"].set_behaviour({"chat": {"sse": ["data: {}\n\n"], "end": "reset"}})
        stream = await client.chat.completions.create(model="m", messages=self.PICTURES, stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            [chunk async for chunk in stream]
