"""`epdctl worker encode` with a model of tiles: real process, real Mooncake, a real consumer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from epdctl.worker.transfer.tensors import TensorContract
from tests.e2e.encode_worker import Consumer, EncodeWorker, new_id, open_consumer, part, start_worker
from tests.stubs.towers import WholeModel, tower_pictures, write_tower_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.worker]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random LLaVA-NeXT, whose pictures have rows of their own count."""
    made = tmp_path_factory.mktemp("model") / "llava_next"
    write_tower_checkpoint(made, "llava_next")
    return made


@pytest.fixture(scope="module")
def started(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncodeWorker]:
    """Start one worker for the module."""
    worker = start_worker(tmp_path_factory.mktemp("logs"), model=folder)
    yield worker
    worker.process.close()


@pytest.fixture
async def consumer() -> AsyncIterator[Consumer]:
    """Run a consumer."""
    async with open_consumer() as running:
        yield running


async def test_rows_at_the_consumer_are_those_of_the_whole_model(
    started: EncodeWorker, consumer: Consumer, folder: Path
) -> None:
    """Pictures of several sizes reach the consumer with the whole model's rows; metadata is empty, and the
    same picture again comes from the cache."""
    worker, whole = await started.ready(), WholeModel(folder)
    pictures = tower_pictures()
    ids = [new_id() for _ in pictures]

    reply = await worker.encode(
        *(part(data, f"p{n}") for n, data in enumerate(pictures)), consumer=consumer.address, transfer_ids=ids
    )
    again = await worker.encode(part(pictures[0], "again"))

    for number, (data, transfer_id) in enumerate(zip(pictures, ids, strict=True)):
        assert reply.items[f"p{number}"]["metadata"] == {}
        expected = whole.rows(data)
        found = await consumer.rows(transfer_id, f"p{number}", (expected.shape[0], expected.shape[1]))
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert again.status == 200
    assert await worker.metric("epdctl_cache_requests_total", tier="l1", result="hit") == 1


async def test_consumer_of_another_data_type_is_named_at_the_first_reserve(started: EncodeWorker) -> None:
    """A consumer that takes bfloat16 refuses a float32 item; the answer names both, nothing stays behind."""
    worker = await started.ready()
    contract = TensorContract(dtype="bfloat16", widths=frozenset({48}))

    async with open_consumer(contract=contract) as consumer:
        data = tower_pictures()[1]
        refused = await worker.encode(part(data, "p"), consumer=consumer.address, transfer_ids=[new_id()])

        message = refused.body["error"]["message"]
        assert (refused.status, refused.code) == (502, "transfer_failed")
        assert "bfloat16" in message and "float32" in message and "--dtype" in message
        assert consumer.receiver.stats().items == 0


async def test_video_and_options_that_the_model_lacks(started: EncodeWorker) -> None:
    """A video, and bounds of pixels, are refused where tiles have one size; the answer names them."""
    worker = await started.ready()
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}

    refused = await worker.encode(video)
    bounded = await worker.encode(part(tower_pictures()[0]), mm_processor_kwargs={"max_pixels": 9})

    assert (refused.status, refused.code) == (400, "unsupported_media")
    assert (bounded.status, bounded.body["error"]["param"]) == (400, "mm_processor_kwargs")
