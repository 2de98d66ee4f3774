"""An encode worker that writes into a shared folder, without Mooncake; and that folder full, or gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from epdctl.worker.transfer.ec_file import FILE_NAME
from epdctl.worker.transfer.shared_folder import WORK_FOLDER, this_machine
from tests.e2e.encode_worker import MODELS, EncodeWorker, Truth, new_id, part, picture, start_worker
from tests.stubs.process import wait_until
from tests.stubs.small_disk import SmallDisk, small_disk

pytestmark = [pytest.mark.fault, pytest.mark.worker, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    """Make a small file system with a folder for embeddings on it."""
    with small_disk(tmp_path_factory.mktemp("disk") / "small") as made:
        (made.path / "ec").mkdir()
        yield made


@pytest.fixture(scope="module")
def folder(disk: SmallDisk) -> Path:
    """Return the folder that consumers would read."""
    return disk.path / "ec"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[EncodeWorker]:
    """Start a worker with two engines that cannot import Mooncake."""
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "mooncake").mkdir()
    (blocked / "mooncake" / "__init__.py").write_text("raise ImportError('not on this machine')\n")
    worker = start_worker(
        tmp_path_factory.mktemp("shared-folder"),
        *("--ec-connector", "shared-filesystem", "--shared-storage-path", str(folder)),
        *("--data-parallel-size", "2", "--transfer-timeout", "5"),
        env={"PYTHONPATH": os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])},
    )
    yield worker
    worker.process.close()


@pytest.fixture
async def worker(started: EncodeWorker) -> AsyncIterator[EncodeWorker]:
    """Return the worker with both engines well, before and after the test."""
    yield await _well(started)
    await _well(started)


async def _well(worker: EncodeWorker) -> EncodeWorker:
    async def both_serve() -> bool:
        if not await worker.is_healthy():
            return False
        return all(e["state"] == "ready" and e["reason"] is None for e in await worker.engines())

    await worker.process.wait_until(both_serve, "both engines serve", 120.0)
    return worker


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Return the model as transformers alone runs it."""
    return Truth(MODELS / "qwen2_5_vl")


def rows_of(folder: Path, identifier: str) -> torch.Tensor:
    """Return what a consumer would load."""
    loaded = load_file(folder / identifier / FILE_NAME)
    assert list(loaded) == ["ec_cache"]
    return loaded["ec_cache"]


def stored(folder: Path) -> set[str]:
    """Return the identifiers whose files are there."""
    return {file.parent.name for file in folder.glob(f"*/{FILE_NAME}")}


def unfinished(folder: Path) -> list[str]:
    """Return the files that are being written."""
    return [entry.name for entry in (folder / WORK_FOLDER).iterdir()]


async def test_a_consumer_finds_the_rows_of_the_tower(
    worker: EncodeWorker, folder: Path, truth: Truth
) -> None:
    """Two pictures, one of them unnamed: a whole file each under the reported identifier when the answer
    comes, metadata as a vLLM encoder has it, and no transfer id; a second request writes nothing."""
    red, blue = picture((200, 9, 9)), picture((9, 9, 200), (84, 140))
    before = await worker.metric("epdctl_ec_transfers_total", side="producer", outcome="delivered")

    reply = await worker.encode(part(red, "a-red_1"), part(blue), model="tiny")
    again = await worker.encode(part(red, "a-red_1"), model="tiny")

    assert "a-red_1" in reply.items
    assert again.items["a-red_1"] == reply.items["a-red_1"]
    for name, entry in reply.items.items():
        data = red if name == "a-red_1" else blue
        assert set(entry) == {"modality", "item_indices", "metadata"}
        assert torch.allclose(rows_of(folder, name), truth.rows(data), rtol=1e-4, atol=1e-4)
    assert unfinished(folder) == []
    metric = "epdctl_ec_transfers_total"
    assert await worker.metric(metric, side="producer", outcome="delivered") == before + 2
    assert await worker.metric(metric, side="producer", outcome="cached") >= 1
    assert await worker.metric("epdctl_ec_bytes_total", side="producer") > 0


async def test_what_a_folder_cannot_do_is_refused(worker: EncodeWorker, folder: Path) -> None:
    """A named consumer, and a uuid that is no folder name, are 400 with the field; nothing is written."""
    before = stored(folder)

    pushed = await worker.encode(part(picture()), consumer="tcp://127.0.0.1:1", transfer_ids=[new_id()])
    named = await worker.encode(part(picture(), "../outside"))

    assert (pushed.status, pushed.body["error"]["param"]) == (400, "ec_transfer_params.consumer_zmq")
    assert (named.status, named.code) == (400, "invalid_request")
    assert named.body["error"]["param"] == "messages[0].content[0].uuid"
    assert stored(folder) == before
    assert not (folder.parent / "outside").exists()


async def test_a_full_disk_fails_items_until_there_is_space(
    worker: EncodeWorker, disk: SmallDisk, folder: Path, truth: Truth
) -> None:
    """Disk full: 507 `storage_full` for what is new, 200 for what is there, no unfinished file, /health says
    why; with space again the worker heals without traffic and the same picture is delivered."""
    old, new = picture((1, 200, 1)), picture((200, 200, 1))
    await worker.encode(part(old, "old"))
    disk.fill(worker.engine_pids())
    try:
        replies = [await worker.encode(part(new, f"new-{number % 2}")) for number in range(6)]
        there = await worker.encode(part(old, "old"))
        left = (unfinished(folder), stored(folder))

        async def is_unhealthy() -> bool:
            # Each picture has a home: in the end both engines have failed three times in a row.
            fresh = picture((200, len(replies), 2))
            replies.append(await worker.encode(part(fresh, "new-2")))
            return not await worker.is_healthy()

        await wait_until(is_unhealthy, "/health says so", 30.0)
        reason = json.loads((await worker.get("/health"))[1])["reason"]
    finally:
        disk.empty()
    await _well(worker)
    after = await worker.encode(part(new, "new-0"))

    assert {(reply.status, reply.code) for reply in replies} == {(507, "storage_full")}
    assert there.status == 200
    assert left[0] == []
    assert not left[1] & {"new-0", "new-1", "new-2"}
    assert "takes no more" in reason
    assert after.status == 200
    assert torch.allclose(rows_of(folder, "new-0"), truth.rows(new), rtol=1e-4, atol=1e-4)


async def test_a_folder_that_is_gone_fails_items_until_it_is_back(worker: EncodeWorker, folder: Path) -> None:
    """Gone: 503 `storage_unavailable`, and nothing is made in its place; back: as before."""
    away = folder.with_name("away")
    os.rename(folder, away)  # noqa: PTH104
    try:
        reply = await worker.encode(part(picture((7, 7, 7)), "gone"))
        entries = os.listdir(folder.parent)  # noqa: PTH208
    finally:
        os.rename(away, folder)  # noqa: PTH104
    after = await worker.encode(part(picture((7, 7, 7)), "gone"))

    assert (reply.status, reply.code) == (503, "storage_unavailable")
    assert folder.name not in entries
    assert after.status == 200
    assert "gone" in stored(folder)


async def restarted(worker: EncodeWorker) -> int:
    """Return how often engines were started again."""
    return sum(engine["restarts"] for engine in await worker.engines())


async def test_a_killed_engine_leaves_no_torn_file(worker: EncodeWorker, folder: Path, truth: Truth) -> None:
    """kill -9 of one engine under load: all are answered, every file under a name is whole, and what the
    engine left unfinished is removed by its successor; what another process writes is not touched."""
    killed = worker.engine_pid()
    restarts = await restarted(worker)
    left_over = folder / WORK_FOLDER / f"{this_machine()}-{killed}-{'0' * 16}.part"
    others = folder / WORK_FOLDER / f"{this_machine()}-{os.getpid()}-{'0' * 16}.part"
    left_over.write_bytes(b"half of a")
    others.write_bytes(b"half of a")
    data = {f"k{number}": picture((number * 9, 5, 5), (56, 84)) for number in range(24)}
    waiting = [asyncio.create_task(worker.encode(part(item, name))) for name, item in data.items()]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=30.0)

    os.kill(killed, signal.SIGKILL)
    replies = await asyncio.gather(*waiting)

    async def is_another() -> bool:
        return await restarted(worker) > restarts

    await wait_until(is_another, "the engine is started again", 60.0)
    await _well(worker)

    assert [reply.status for reply in replies] == [200] * 24
    for name, item in data.items():
        assert torch.allclose(rows_of(folder, name), truth.rows(item), rtol=1e-4, atol=1e-4)
    assert unfinished(folder) == [others.name]
    others.unlink()
