"""`epdctl worker encode` as its neighbours see it: real process, real Mooncake, a real consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

from epdctl.domain import Modality
from epdctl.worker.encode.identifier import item_identifier
from tests.e2e.encode_worker import (
    MODELS,
    Consumer,
    EncodeWorker,
    Truth,
    new_id,
    open_consumer,
    part,
    picture,
    solid,
    start_worker,
)
from tests.e2e.video_patches import prepared_video
from tests.stubs.process import wait_until
from tests.stubs.videos import clip, video_part

pytestmark = [pytest.mark.e2e, pytest.mark.worker]

RED, BLUE = picture((200, 30, 30)), picture((20, 30, 220), (140, 84))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> str:
    """Return each tiny checkpoint in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def truth(family: str) -> Truth:
    """Load the checkpoint whole."""
    return Truth(MODELS / family)


@pytest.fixture(scope="module")
def started(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncodeWorker]:
    """Start one worker for the module."""
    logs = tmp_path_factory.mktemp("logs")
    pictures = logs / "pictures"
    pictures.mkdir()
    (pictures / "red.png").write_bytes(RED)
    worker = start_worker(logs, "--allowed-local-media-path", str(pictures), model=family)
    yield worker
    worker.process.close()


@pytest.fixture
async def worker(started: EncodeWorker) -> EncodeWorker:
    """Return the worker once it is healthy."""
    return await started.ready()


@pytest.fixture
async def consumer() -> AsyncIterator[Consumer]:
    """Run a consumer."""
    async with open_consumer() as running:
        yield running


async def test_rows_at_the_consumer_are_those_of_the_tower(
    worker: EncodeWorker, consumer: Consumer, truth: Truth
) -> None:
    """Two pictures of one request reach the consumer, each under its id, equal to the bit."""
    ids = [new_id(), new_id()]

    reply = await worker.encode(
        part(RED, "red"), part(BLUE, "blue"), consumer=consumer.address, transfer_ids=ids, model="tiny"
    )

    assert {name: entry["item_indices"] for name, entry in reply.items.items()} == {"red": [0], "blue": [1]}
    for name, transfer_id, data in (("red", ids[0], RED), ("blue", ids[1], BLUE)):
        expected = truth.rows(data)
        entry = reply.items[name]
        assert entry["transfer_id"] == transfer_id
        assert entry["modality"] == "image"
        time, height, width = entry["metadata"]["image_grid_thw"]
        assert time * height * width // 4 == expected.shape[0]
        rows = await consumer.rows(transfer_id, name, (expected.shape[0], expected.shape[1]))
        assert torch.equal(rows, expected)


async def test_identical_pictures_are_delivered_twice(worker: EncodeWorker, consumer: Consumer) -> None:
    """Two identical pictures: one entry in the reply, both transfer ids arrive, the tower ran once."""
    data = picture((1, 2, 3), (96, 128))
    ids = [new_id(), new_id()]
    forwards = await worker.metric("epdctl_encode_seconds_count")

    reply = await worker.encode(
        part(data, "twin"), part(data, "twin"), consumer=consumer.address, transfer_ids=ids
    )

    entry = reply.items["twin"]
    assert (entry["item_indices"], entry["transfer_id"]) == ([0, 1], ids[1])
    assert len(reply.items) == 1
    for transfer_id in ids:
        assert await consumer.is_ready(transfer_id)
    assert await worker.metric("epdctl_encode_seconds_count") == forwards + 1


async def test_second_sight_of_a_picture_is_a_cache_hit(
    worker: EncodeWorker, consumer: Consumer, truth: Truth
) -> None:
    """A picture seen before costs no forward, whatever it is called now, and its rows are the same."""
    data = picture((7, 99, 7), (100, 100))
    await worker.encode(part(data, "first"), consumer=consumer.address, transfer_ids=[new_id()])
    hits = await worker.metric("epdctl_cache_requests_total", tier="l1", result="hit")
    forwards = await worker.metric("epdctl_encode_seconds_count")
    transfer_id = new_id()

    await worker.encode(part(data, "second"), consumer=consumer.address, transfer_ids=[transfer_id])

    assert await worker.metric("epdctl_cache_requests_total", tier="l1", result="hit") == hits + 1
    assert await worker.metric("epdctl_encode_seconds_count") == forwards
    expected = truth.rows(data)
    rows = await consumer.rows(transfer_id, "second", (expected.shape[0], expected.shape[1]))
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("name", ["same", None], ids=["one name", "no name"])
async def test_one_name_for_two_pictures_mixes_nothing(
    worker: EncodeWorker, truth: Truth, name: str | None
) -> None:
    """A client's uuid is no cache key, nor is the lack of one: another picture under the same name, or under
    none, gives its own rows."""
    for blue in (90, 91):
        data = picture((90, len(name or ""), blue), (84, 84))
        transfer_id = new_id()
        async with open_consumer() as fresh:
            reply = await worker.encode(part(data, name), consumer=fresh.address, transfer_ids=[transfer_id])
            (identifier,) = reply.items
            expected = truth.rows(data)
            rows = await fresh.rows(transfer_id, identifier, (expected.shape[0], expected.shape[1]))
        assert name in (None, identifier)
        assert torch.equal(rows, expected)


async def test_one_colour_in_two_shapes_is_two_embeddings(
    worker: EncodeWorker, consumer: Consumer, truth: Truth
) -> None:
    """Solid pictures of 2:1 and 1:2 of one colour, back to back: each gives the rows of its own shape."""
    for name, size in (("wide", (168, 84)), ("tall", (84, 168))):
        data = solid((77, 77, 200), size)
        transfer_id = new_id()
        reply = await worker.encode(part(data, name), consumer=consumer.address, transfer_ids=[transfer_id])
        expected = truth.rows(data)
        rows = await consumer.rows(transfer_id, name, (expected.shape[0], expected.shape[1]))
        assert torch.equal(rows, expected)
        _, height, width = reply.items[name]["metadata"]["image_grid_thw"]
        assert (width > height) is (name == "wide")


async def test_options_change_the_rows_and_the_key(
    worker: EncodeWorker, consumer: Consumer, truth: Truth
) -> None:
    """Processor options reach the processor, and a picture with other options is no cache hit."""
    data = picture((60, 60, 0), (300, 300))
    await worker.encode(part(data, "plain"), consumer=consumer.address, transfer_ids=[new_id()])
    bounds = {"shortest_edge": 3136, "longest_edge": 12544}
    transfer_id = new_id()

    reply = await worker.encode(
        part(data, "small"),
        consumer=consumer.address,
        transfer_ids=[transfer_id],
        mm_processor_kwargs={"min_pixels": 3136, "max_pixels": 12544},
    )

    (identifier,) = reply.body["ec_transfer_params"]
    expected = truth.rows(data, size=bounds)
    rows = await consumer.rows(transfer_id, identifier, (expected.shape[0], expected.shape[1]))
    assert torch.equal(rows, expected)


async def test_many_pictures_at_once_are_batched_and_right(
    worker: EncodeWorker, consumer: Consumer, truth: Truth
) -> None:
    """Pictures of many requests share forwards, and each consumer gets the rows of its own picture."""
    pictures = [picture((20 * n, 250 - 20 * n, 40), (60 + 13 * n, 150 - 9 * n)) for n in range(10)]
    ids = [new_id() for _ in pictures]
    forwards = await worker.metric("epdctl_encode_seconds_count")

    await asyncio.gather(
        *(
            worker.encode(part(data, f"m{n}"), consumer=consumer.address, transfer_ids=[ids[n]])
            for n, data in enumerate(pictures)
        )
    )

    for n, data in enumerate(pictures):
        expected = truth.rows(data)
        rows = await consumer.rows(ids[n], f"m{n}", (expected.shape[0], expected.shape[1]))
        assert torch.allclose(rows, expected, rtol=1e-4, atol=1e-5)
    assert await worker.metric("epdctl_encode_seconds_count") <= forwards + 10


async def test_broken_picture_fails_alone(worker: EncodeWorker, consumer: Consumer) -> None:
    """Seven good pictures and a broken one at the same time: seven are delivered, one is 400."""
    good = [picture((n, n, 200), (70 + n, 90)) for n in range(7)]
    broken = good[0][: len(good[0]) // 2]
    ids = [new_id() for _ in range(8)]

    replies = await asyncio.gather(
        *(
            worker.encode(part(data, f"b{n}"), consumer=consumer.address, transfer_ids=[ids[n]])
            for n, data in enumerate([*good[:4], broken, *good[4:]])
        )
    )

    assert [reply.status for reply in replies] == [200] * 4 + [400] + [200] * 3
    assert (replies[4].code, replies[4].body["error"]["param"]) == (
        "media_unavailable",
        "messages[0].content[0]",
    )
    assert await worker.metric("epdctl_arena_bytes", state="pinned") == 0


async def test_broken_picture_among_good_ones_is_named(worker: EncodeWorker) -> None:
    """A request with a broken picture is refused, and the answer says which part it is."""
    reply = await worker.encode(part(RED), part(b""), part(BLUE))

    assert (reply.status, reply.code) == (400, "media_unavailable")
    assert reply.body["error"]["param"] == "messages[0].content[1]"


async def test_one_name_for_two_pictures_of_a_request_is_refused(worker: EncodeWorker) -> None:
    """Two different pictures under one uuid in one request are 400: a consumer could not tell them apart."""
    reply = await worker.encode(part(RED, "same"), part(BLUE, "same"))

    assert (reply.status, reply.code) == (400, "invalid_request")
    assert reply.body["error"]["param"] == "messages[0].content[1].uuid"


async def test_without_a_consumer_nothing_is_pushed(worker: EncodeWorker) -> None:
    """A request without `consumer_zmq` is encoded and answered; its name is then the content's."""
    sent = await worker.metric("epdctl_ec_transfers_total", side="producer")
    first = await worker.encode({"type": "text", "text": "What is it?"}, part(picture((5, 5, 5))))
    again = await worker.encode(part(picture((5, 5, 5))))

    assert list(first.items) == list(again.items)
    assert "transfer_id" not in next(iter(first.items.values()))
    assert await worker.metric("epdctl_ec_transfers_total", side="producer") == sent


async def test_local_file_is_read_where_it_is_allowed(worker: EncodeWorker, started: EncodeWorker) -> None:
    """A file under --allowed-local-media-path is encoded like the same bytes in a data URL."""
    folder = started.process.stderr_path.parent / "pictures"

    by_file = await worker.encode({"type": "image_url", "image_url": {"url": f"file://{folder}/red.png"}})
    by_data = await worker.encode(part(RED))
    outside = await worker.encode({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}})

    assert list(by_file.items) == list(by_data.items)
    assert (outside.status, outside.code) == (400, "media_unavailable")


async def test_both_ends_count_the_same_bytes(worker: EncodeWorker, consumer: Consumer) -> None:
    """What the worker says it moved is what the consumer says it received."""
    before = await worker.metric("epdctl_ec_bytes_total", side="producer")

    for n in range(3):
        data = picture((n, 111, 5 * n), (120, 90 + n))
        reply = await worker.encode(part(data, f"c{n}"), consumer=consumer.address, transfer_ids=[new_id()])
        assert reply.status == 200

    moved = await worker.metric("epdctl_ec_bytes_total", side="producer") - before
    assert moved > 0
    arena = consumer.receiver.stats().arena_bytes
    assert arena["used"] + arena["resident"] >= moved


async def test_other_model_names_and_bodies_are_refused(worker: EncodeWorker) -> None:
    """A wrong model name is 404 `model_not_found`; a body that is no JSON is 400 `invalid_request`."""
    wrong = await worker.encode(part(RED), model="other")
    async with (
        aiohttp.ClientSession() as session,
        session.post(worker.url + "/v1/chat/completions", data=b"{nope") as answer,
    ):
        body = await answer.json()

    assert (wrong.status, wrong.code) == (404, "model_not_found")
    assert (answer.status, body["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/completions", 501),
        ("POST", "/v1/embeddings", 501),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/start_profile", 404),
        ("POST", "/pause", 404),
        ("DELETE", "/instances", 404),
    ],
)
async def test_other_verbs_are_refused_and_harm_nothing(
    worker: EncodeWorker, method: str, path: str, status: int
) -> None:
    """Endpoints of `/v1/` that an encode worker does not serve are 501, others 404, other methods of those
    that it serves 405; it goes on serving."""
    async with aiohttp.ClientSession() as session, session.request(method, worker.url + path) as answer:
        body = await answer.json()

    assert answer.status == status
    codes = {501: "unsupported_endpoint", 405: "method_not_allowed", 404: "invalid_request"}
    assert body["error"]["code"] == codes[status]
    assert (await worker.encode(part(RED))).status == 200


async def test_models_and_version_are_listed(worker: EncodeWorker) -> None:
    """The served model's name and the version can be asked for."""
    status, models = await worker.get("/v1/models")

    assert status == 200
    assert '"id":"tiny"' in models
    assert (await worker.get("/version"))[0] == 200


async def test_nothing_is_left_when_all_is_done(worker: EncodeWorker) -> None:
    """After all requests nothing is in flight and no arena byte is pinned."""

    async def nothing_pinned() -> bool:
        return await worker.metric("epdctl_arena_bytes", state="pinned") == 0

    await wait_until(nothing_pinned, "nothing pinned", 20.0)
    assert await worker.metric("epdctl_in_flight", stage="encode") == 0


def test_logs_hold_no_media(started: EncodeWorker) -> None:
    """No media and no data URL ever reach the log."""
    assert "base64" not in Path(started.process.stderr_path).read_text()


async def test_video_and_picture_of_one_request(
    worker: EncodeWorker, consumer: Consumer, truth: Truth, family: str
) -> None:
    """A video's rows are those of the whole model, and it is told of as vLLM tells of it; a picture beside it
    keeps its own."""
    ids, data = [new_id(), new_id()], clip(first=3)

    reply = await worker.encode(
        video_part(data, "clip"), part(RED, "still"), consumer=consumer.address, transfer_ids=ids
    )

    prepared = prepared_video(MODELS / family, data)
    layout = prepared.layout
    assert reply.items["clip"] == {
        "modality": "video",
        "item_indices": [0],
        "metadata": layout.metadata,
        "transfer_id": ids[0],
    }
    assert reply.items["still"]["modality"] == "image"
    expected = truth.video_rows(torch.from_numpy(prepared.pixels), layout.geometry)
    assert torch.equal(await consumer.rows(ids[0], "clip", tuple(expected.shape)), expected)
    picture_rows = truth.rows(RED)
    assert torch.equal(await consumer.rows(ids[1], "still", tuple(picture_rows.shape)), picture_rows)


async def test_media_options_name_and_change_a_video(worker: EncodeWorker) -> None:
    """With media options a video is called what a vLLM consumer calls it, and other frames are taken."""
    media = {"video": {"num_frames": 2, "video_backend": "opencv"}}

    reply = await worker.encode(video_part(clip(first=5), "clip"), media_io_kwargs=media)

    ((name, entry),) = reply.items.items()
    model = str(MODELS / ("qwen3_vl" if "timestamps" in entry["metadata"] else "qwen2_5_vl"))
    assert name == item_identifier(
        model=model, modality=Modality.VIDEO, uuid="clip", processor_options={}, media_options=media
    )
    assert entry["metadata"]["video_grid_thw"][0] == 1


async def test_broken_video_costs_its_request_only(worker: EncodeWorker) -> None:
    """Eight good videos and a truncated one together: eight answers, and one 400 that names the part."""
    good = [worker.encode(video_part(clip(first=10 + n))) for n in range(8)]

    *answers, broken = await asyncio.gather(*good, worker.encode(part(RED), video_part(clip()[:900])))

    assert [answer.status for answer in answers] == [200] * 8
    assert (broken.status, broken.code) == (400, "media_unavailable")
    assert broken.body["error"]["param"] == "messages[0].content[1]"
