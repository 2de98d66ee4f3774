"""Stub instances answer as real ones did, and misbehave as told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.conftest import StartStub
from tests.stubs.behaviour import UnknownBehaviour, parse_behaviour
from tests.stubs.instance import StubInstance
from tests.stubs.process import wait_until

pytestmark = pytest.mark.contract

PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAAcCAIAAAD/"  # header of a 56 by 28 PNG


def image_body(**more: Any) -> dict[str, Any]:
    """Return an encode body with one 56 by 28 picture."""
    part = {"type": "image_url", "image_url": {"url": PICTURE}, "uuid": "u1"}
    return {"model": "m", "messages": [{"role": "user", "content": [part]}], "stream": False} | more


async def post(stub: StubInstance, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    """Return the status and the whole body of one call."""
    async with aiohttp.ClientSession() as session, session.post(stub.url + path, json=body) as response:
        return response.status, await response.read()


class TestRightAnswers:
    """Without instructions a stub is a good instance of its role."""

    async def test_encoder_reports_each_item(self, stub: StartStub) -> None:
        """An encoder answers with one entry per feature: positions, grid from the picture, transfer id."""
        encoder = await stub("encode")
        body = image_body(ec_transfer_params={"ec_items": [{"transfer_id": "t1"}]})
        status, answer = await post(encoder, body)
        assert status == 200
        assert json.loads(answer)["ec_transfer_params"] == {
            "u1": {
                "modality": "image",
                "item_indices": [0],
                "metadata": {"image_grid_thw": [1, 4, 6]},
                "transfer_id": "t1",
            }
        }

    async def test_identical_items_share_an_entry(self, stub: StartStub) -> None:
        """Two identical items give one entry with both positions and only the last transfer id."""
        encoder = await stub("encode")
        body = image_body(ec_transfer_params={"ec_items": [{"transfer_id": "a"}, {"transfer_id": "b"}]})
        body["messages"][0]["content"] *= 2
        entry = json.loads((await post(encoder, body))[1])["ec_transfer_params"]["u1"]
        assert (entry["item_indices"], entry["transfer_id"]) == ([0, 1], "b")

    async def test_options_change_the_name(self, stub: StartStub) -> None:
        """Options in force make the feature's name differ from the uuid, as vLLM's do."""
        encoder = await stub("encode")
        answer = await post(encoder, image_body(mm_processor_kwargs={"max_pixels": 6272}))
        assert "u1" not in json.loads(answer[1])["ec_transfer_params"]

    async def test_prefill_hands_off(self, stub: StartStub) -> None:
        """A prefill answers one token and the parameters decode needs."""
        prefill = await stub("prefill")
        answer = json.loads(
            (await post(prefill, text_body(kv_transfer_params={"do_remote_decode": True})))[1]
        )
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["kv_transfer_params"]["do_remote_prefill"] is True

    async def test_decode_streams_to_done(self, stub: StartStub) -> None:
        """A decode streams events, with usage when asked for, and ends with [DONE]."""
        decode = await stub("decode")
        body = text_body(stream=True, stream_options={"include_usage": True})
        _, stream = await post(decode, body)
        assert stream.endswith(b"data: [DONE]\n\n")
        assert stream.count(b'"usage"') == 1
        assert decode.chats[0].sent == stream

    async def test_mix_of_raw_and_embeds_is_refused(self, stub: StartStub) -> None:
        """A body with a raw image next to an image embedding gets vLLM's 400."""
        decode = await stub("decode")
        body = image_body()
        body["messages"][0]["content"].append({"type": "image_embeds", "image_embeds": {}, "uuid": "u2"})
        assert (await post(decode, body))[0] == 400


def text_body(**more: Any) -> dict[str, Any]:
    """Return a chat body without media."""
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | more


class TestMisbehaviour:
    """Told to, a stub breaks off, hangs or answers nonsense, and says so when it does not know a word."""

    @pytest.mark.parametrize(
        ("chat", "error"),
        [
            ({"fail": "reset_before_body"}, aiohttp.ClientConnectionError),
            ({"fail": "reset_after_body"}, aiohttp.ClientConnectionError),
            ({"fail": "reset_after_headers"}, (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)),
            ({"fail": "reset_after_chunk"}, (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)),
            ({"fail": "refuse"}, aiohttp.ClientConnectorError),
            ({"chunks": 2, "end": "reset"}, (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)),
        ],
    )
    async def test_breaks_the_connection(self, stub: StartStub, chat: dict[str, Any], error: Any) -> None:
        """Each way to fail ends the client's call with a connection or payload error."""
        broken = await stub("decode", {"chat": chat})
        with pytest.raises(error):
            await post(broken, text_body(stream=True))

    @pytest.mark.parametrize("behaviour", [{"chat": {"hang": True}}, {"listen_backlog_full": True}])
    async def test_hangs(self, stub: StartStub, behaviour: dict[str, Any]) -> None:
        """A hanging stub and one that accepts nothing give no answer at all."""
        hung = await stub("decode", behaviour)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await post(hung, text_body())

    async def test_sequence_ends_in_right_answers(self, stub: StartStub) -> None:
        """A sequence gives one entry a call and the right answer after its end."""
        flaky = await stub("decode", {"chat": {"sequence": [{"status": 500}, "default"]}})
        assert [(await post(flaky, text_body()))[0] for _ in range(3)] == [500, 200, 200]

    async def test_health_sequence_repeats_its_end(self, stub: StartStub) -> None:
        """The last value of a health sequence repeats."""
        sick = await stub("decode", {"health": {"sequence": [200, 503]}})
        async with aiohttp.ClientSession() as session:
            seen = [(await session.get(sick.url + "/health")).status for _ in range(3)]
        assert seen == [200, 503, 503]

    async def test_notes_when_the_client_leaves(self, stub: StartStub) -> None:
        """A client that leaves before the answer is noticed at once."""
        slow = await stub("decode", {"chat": {"delay_ms": 10_000}})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await post(slow, text_body())
        await wait_until(lambda: slow.calls[0].client_left_at is not None, "client seen leaving", 1)
        assert slow.open_connections == 0

    async def test_refusing_stub_can_come_back(self, stub: StartStub) -> None:
        """A stub set back from refusing answers on the same port."""
        decode = await stub("decode", {"chat": {"fail": "refuse"}})
        await decode.set_behaviour({})
        assert (await post(decode, text_body()))[0] == 200

    @pytest.mark.parametrize(
        "behaviour",
        [{"chat": {"chunkz": 1}}, {"healthy": {}}, {"chat": {"end": "maybe"}}, {"health": {"x": 1}}],
    )
    def test_unknown_words_are_named(self, behaviour: dict[str, Any]) -> None:
        """A word outside the vocabulary raises, naming it."""
        with pytest.raises(UnknownBehaviour, match=r"chunkz|healthy|maybe|health\.x"):
            parse_behaviour(behaviour)
