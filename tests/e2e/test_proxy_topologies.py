"""What reaches each stage, on every topology and for every kind of media."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp.web
import pytest
import pytest_asyncio

from tests.e2e.proxy_world import PICTURE, ProxyWorld, picture_request, proxy_world, text_request
from tests.stubs.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRgAA", "format": "wav"}}
SOUND = {"type": "audio_url", "audio_url": {"url": "https://media.example/a.wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
IMAGE = {"type": "image_url", "image_url": {"url": PICTURE}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProxyWorld]:
    """One encoder, one prefill, one decode."""
    roles = {"e0": "encode", "p0": "prefill", "d0": "decode"}
    async with proxy_world(tmp_path_factory.mktemp("split"), roles, with_consumer=True) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProxyWorld]:
    """One encoder, one prefill_decode, and an EC consumer."""
    roles = {"e0": "encode", "pd0": "prefill_decode"}
    async with proxy_world(tmp_path_factory.mktemp("pair"), roles, with_consumer=True) as it:
        yield it


@pytest.fixture
async def fresh(split: ProxyWorld, pair: ProxyWorld) -> None:
    """Both fleets as if nothing had happened."""
    await split.reset()
    await pair.reset()


def content_of(call: Any) -> list[dict[str, Any]]:
    """Return the parts of the first message of a call."""
    return call.json["messages"][0]["content"]


@pytest.mark.usefixtures("fresh")
class TestBothTopologies:
    """What holds on E+PD and on E+P+D."""

    @pytest.mark.parametrize("name", ["split", "pair"])
    async def test_text_goes_past_the_encoder(self, name: str, split: ProxyWorld, pair: ProxyWorld) -> None:
        """A text-only request needs no encoder, and its bytes reach decode as they came."""
        world = {"split": split, "pair": pair}[name]
        data = b'{ "model" : "m", "messages":[ {"role":"user","content":"hi"} ],  "seed": 1e0 }'
        reply = await world.ask("POST", "/v1/chat/completions", data=data)

        assert reply.status == 200
        assert not world["e0"].chats
        last = world["pd0"] if name == "pair" else world["p0"]
        assert b'"seed":1e0' in last.chats[0].body.replace(b" ", b"")
        if name == "pair":
            assert last.chats[0].body == data

    @pytest.mark.parametrize("name", ["split", "pair"])
    @pytest.mark.parametrize(
        "parts",
        [[IMAGE], [AUDIO], [SOUND], [VIDEO], [IMAGE, AUDIO, VIDEO, IMAGE, SOUND]],
        ids=["image", "audio", "audio url", "video", "mixed"],
    )
    async def test_media_become_metadata_in_order(
        self, name: str, parts: list[dict[str, Any]], split: ProxyWorld, pair: ProxyWorld
    ) -> None:
        """No media reach the language stages; every item is named in its place, to every stage alike."""
        world = {"split": split, "pair": pair}[name]
        body = text_request(messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}])
        assert (await world.chat(body)).status == 200

        asked = [part for call in world["e0"].chats for part in content_of(call)]
        assert sorted(json.dumps(without_uuid(part)) for part in asked) == sorted(map(json.dumps, parts))
        uuids = {json.dumps(without_uuid(part)): part["uuid"] for part in asked}
        kinds = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
        for stage in ("p0", "d0") if name == "split" else ("pd0",):
            *told, words = content_of(world[stage].chats[0])
            assert [part["type"] for part in told] == [f"{kinds[part['type']]}_embeds" for part in parts]
            assert words == {"type": "text", "text": "?"}
            if len(parts) == 1:
                assert [part["uuid"] for part in told] == list(uuids.values())
            ec_items = world[stage].chats[0].json["ec_transfer_params"]["ec_items"]
            assert [item["mm_hash"] for item in ec_items] == [part["uuid"] for part in told]
            assert len({item["transfer_id"] for item in ec_items}) == len(parts)

    async def test_prefill_hands_over_to_decode(self, split: ProxyWorld) -> None:
        """Prefill computes one token; decode gets prefill's parameters word for word."""
        answer = await split.chat(
            picture_request(max_tokens=24, stream=True, stream_options={"include_usage": True})
        )

        assert answer.events[-1] == "[DONE]"
        prefill, decode = split["p0"].chats[0].json, split["d0"].chats[0].json
        assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
        assert "stream_options" not in prefill
        assert (decode["max_tokens"], decode["stream"]) == (24, True)
        assert decode["stream_options"] == {"include_usage": True}
        handed = json.loads(split["p0"].chats[0].sent)["kv_transfer_params"]
        assert decode["kv_transfer_params"] == handed
        assert decode["messages"] == prefill["messages"]

    async def test_the_consumer_is_named_to_the_encoder(self, split: ProxyWorld) -> None:
        """Embeddings are pushed to the address of the consumer's replica, under ids that it is told too."""
        await split.chat(picture_request(2))

        params = split["e0"].chats[0].json["ec_transfer_params"]
        assert split.consumer is not None
        assert params["consumer_zmq"] == split.consumer.address
        told = split["p0"].chats[0].json["ec_transfer_params"]["ec_items"]
        assert [item["transfer_id"] for item in told] == [item["transfer_id"] for item in params["ec_items"]]

    async def test_answers_reach_the_client_unchanged(self, pair: ProxyWorld) -> None:
        """Whole and streamed bodies are relayed byte for byte."""
        for body in (picture_request(), picture_request(stream=True)):
            reply = await pair.chat(body)
            assert reply.body == pair["pd0"].chats[-1].sent

    async def test_an_item_without_metadata_keeps_everything_raw(self, pair: ProxyWorld) -> None:
        """An encoder that reports nothing leaves a body that consumers can serve by themselves."""
        await pair["e0"].set_behaviour({"chat": {"json": {"id": "x", "choices": []}}})
        assert (await pair.chat(picture_request(2))).status == 200

        parts = content_of(pair["pd0"].chats[0])
        assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
        assert [part["uuid"] for part in parts[:2]] == [
            part["uuid"] for part in content_of(pair["e0"].chats[0])
        ]

    async def test_equal_pictures_fill_both_places(self, pair: ProxyWorld) -> None:
        """Hazard 38: one picture twice: one uuid, two places, two transfer ids."""
        body = text_request(messages=[{"role": "user", "content": [IMAGE, IMAGE]}])
        assert (await pair.chat(body)).status == 200

        one, two = content_of(pair["pd0"].chats[0])
        assert one == two
        items = pair["pd0"].chats[0].json["ec_transfer_params"]["ec_items"]
        asked = pair["e0"].chats[0].json["ec_transfer_params"]["ec_items"]
        assert [item["transfer_id"] for item in items] == [item["transfer_id"] for item in asked]

    async def test_a_url_is_not_its_content(self, pair: ProxyWorld) -> None:
        """The same URL twice gets two uuids; the same inline picture gets one."""
        away = {"type": "image_url", "image_url": {"url": "https://media.example/a.png"}}
        uuids = []
        for part in (away, away, IMAGE, IMAGE):
            await pair.chat(text_request(messages=[{"role": "user", "content": [part]}]))
            uuids.append(content_of(pair["pd0"].chats[-1])[0]["uuid"])

        assert uuids[0] != uuids[1]
        assert uuids[2] == uuids[3]

    async def test_without_a_hand_off_decode_gets_the_whole_request(self, split: ProxyWorld) -> None:
        """A prefill that hands nothing over: decode gets media, never metadata without an embedding."""
        whole = {"id": "x", "choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "stop"}]}
        await split["p0"].set_behaviour({"chat": {"json": whole}})
        assert (await split.chat(picture_request())).status == 200

        body = split["d0"].chats[0].json
        assert [part["type"] for part in content_of(split["d0"].chats[0])] == ["image_url", "text"]
        assert not {"kv_transfer_params", "ec_transfer_params"} & body.keys()

    async def test_completions(self, split: ProxyWorld, pair: ProxyWorld) -> None:
        """Text completions go the same way, in the form the client chose."""
        for world, last in ((split, "d0"), (pair, "pd0")):
            body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
            reply = await world.ask("POST", "/v1/completions", json_body=body)
            assert reply.status == 200
            assert world[last].chats[0].path == "/v1/completions"
            assert world[last].chats[0].json["prompt"] == [1, 2, 3]

    async def test_several_prompts_cannot_be_handed_over(self, split: ProxyWorld, pair: ProxyWorld) -> None:
        """One hand-off serves one prompt: several are refused with a split, and pass without one."""
        body = {"model": "m", "prompt": ["a", "b"], "max_tokens": 4}
        refused = await split.ask("POST", "/v1/completions", json_body=body)

        assert (refused.status, refused.code) == (400, "invalid_request")
        assert (await pair.ask("POST", "/v1/completions", json_body=body)).status == 200


def without_uuid(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part as the client sent it."""
    return {name: value for name, value in part.items() if name != "uuid"}


class TestFleets:
    """Several instances of a role."""

    async def test_a_replica_is_pinned_on_its_leg_only(self, tmp_path: Path) -> None:
        """The rank goes to the consumer on every route; never to decode beside it, never the client's own."""
        roles = {"e0": "encode", "p0": "prefill", "d0": "decode"}
        register = {
            "e0": {},
            "p0": {"dp_size": 2, "ec_zmq_addrs": ["tcp://127.0.0.1:5901", "tcp://127.0.0.1:5902"]},
            "d0": {},
        }
        async with proxy_world(tmp_path, roles, register=register) as world:
            pinned = {"X-data-parallel-rank": "7"}
            await world.chat(picture_request(), headers=pinned)
            await world.chat(picture_request(stream=True), headers=pinned)
            await world.ask(
                "POST", "/v1/completions", json_body={"model": "m", "prompt": "a"}, headers=pinned
            )

            assert [call.header("X-data-parallel-rank") for call in world["p0"].chats] == ["0", "1", "0"]
            assert {call.header("X-data-parallel-rank") for call in world["d0"].chats} == {None}
            asked = [call.json["ec_transfer_params"]["consumer_zmq"] for call in world["e0"].chats]
            assert asked == ["tcp://127.0.0.1:5901", "tcp://127.0.0.1:5902"]
            dropped = await world.metric("epdctl_dropped_client_params_total", name="x-data-parallel-rank")
            assert dropped == 3

    async def test_pictures_are_spread_and_batched(self, tmp_path: Path) -> None:
        """Items go round the encoders over requests; those of one encoder share calls up to the limit."""
        roles = {"e0": "encode", "e1": "encode", "pd0": "prefill_decode"}
        env = {"ENCODER_MAX_BATCH_SIZE": "2"}
        async with proxy_world(tmp_path, roles, env=env) as world:
            for _ in range(2):
                assert (await world.chat(picture_request(5))).status == 200

            sizes = {
                name: sorted(len(content_of(call)) for call in world[name].chats) for name in ("e0", "e1")
            }
            assert sizes == {"e0": [1, 2, 2], "e1": [1, 2, 2]}

    async def test_no_rewrite(self, tmp_path: Path) -> None:
        """With --no-rewrite media stay as they are on every stage and no uuid is sent; entries are kept."""
        roles = {"e0": "encode", "pd0": "prefill_decode"}
        async with proxy_world(tmp_path, roles, "--no-rewrite", with_consumer=True) as world:
            body = picture_request()
            assert (await world.chat(body)).status == 200

            assert content_of(world["e0"].chats[0]) == content_of_body(body)[:1]
            assert content_of(world["pd0"].chats[0]) == content_of_body(body)
            assert len(world["pd0"].chats[0].json["ec_transfer_params"]["ec_items"]) == 1

    async def test_failed_requests_and_model_lists_move_no_rotation(self, tmp_path: Path) -> None:
        """Hazard 45: requests that cannot be planned and model lists leave the turn where it was."""
        roles = {"pd0": "prefill_decode", "pd1": "prefill_decode", "e0": "encode"}
        async with proxy_world(tmp_path, roles, register={"pd0": {}, "pd1": {}, "e0": {}}) as world:
            await world.chat(text_request())
            delete = f"/instances?url={world['e0'].url}"
            await world.ask("DELETE", delete, headers={"X-API-Key": "e2e-admin-key"})
            for _ in range(3):
                assert (await world.chat(picture_request())).code == "no_encode_instance"
            for _ in range(10):
                assert (await world.ask("GET", "/v1/models")).status == 200
            await world.chat(text_request())

            assert (len(world["pd0"].chats), len(world["pd1"].chats)) == (1, 1)

    async def test_consistent_hashing_keeps_a_picture_with_its_encoder(self, tmp_path: Path) -> None:
        """The same picture meets the same encoder, whose cache has it."""
        roles = {f"e{number}": "encode" for number in range(3)} | {"pd0": "prefill_decode"}
        async with proxy_world(tmp_path, roles, "--encode-policy", "consistent_hashing") as world:
            for _ in range(6):
                await world.chat(picture_request())

            assert sorted(len(world[f"e{number}"].chats) for number in range(3)) == [0, 0, 6]


def content_of_body(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of the first message of a request."""
    return body["messages"][0]["content"]


async def test_mooncake_kv_runs_both_legs_at_once(tmp_path: Path) -> None:
    """Both legs know our transfer id; decode knows the prefill's engine and where to ask for it."""
    port = free_port()
    asked: list[str] = []

    async def query(request: aiohttp.web.Request) -> aiohttp.web.Response:
        asked.append(request.path)
        return aiohttp.web.json_response({"0": {"engine_id": "engine-0", "worker_addr": {}}})

    app = aiohttp.web.Application()
    app.router.add_get("/query", query)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
    bootstrap = f"http://127.0.0.1:{port}"
    roles = {"e0": "encode", "p0": "prefill", "d0": "decode"}
    register = {
        "e0": {},
        "p0": {"kv_bootstrap_addr": bootstrap, "labels": {"kv_connector": "mooncake"}},
        "d0": {},
    }
    async with proxy_world(tmp_path, roles, register=register) as world:
        await world["p0"].set_behaviour({"chat": {"delay_ms": 300, "kv_transfer_params": None}})
        for _ in range(2):
            assert (await world.chat(picture_request())).status == 200

        prefill, decode = world["p0"].chats[0], world["d0"].chats[0]
        transfer_id = prefill.json["kv_transfer_params"]["transfer_id"]
        assert prefill.json["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }
        assert decode.json["kv_transfer_params"] == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": "engine-0",
            "remote_bootstrap_addr": bootstrap,
            "transfer_id": transfer_id,
        }
        assert transfer_id.startswith("xfer-")
        assert abs(prefill.at - decode.at) < 0.2
        assert asked == ["/query"]
        await world["p0"].set_behaviour({"chat": {"status": 400, "json": {"error": {}}}})
        await world["d0"].set_behaviour({"chat": {"hang": True}})
        assert (await world.chat(picture_request())).status == 400
        await world.wait_quiet()
    await runner.cleanup()
