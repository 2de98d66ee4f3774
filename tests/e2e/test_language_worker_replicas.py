"""Claims about data-parallel replicas: a process, an EC control address and a KV pool each."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from tests.e2e.language_worker import HOST, Producer, engine_pids, language_worker, rewritten
from tests.e2e.tiny_pictures import (
    COLOUR_QUESTION,
    QWEN2_5_VL,
    ask,
    expected_answer,
    held_out_pictures,
    text,
)
from tests.e2e.tower import Tower

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.timeout(180)]


async def test_a_request_is_served_where_its_embedding_was_pushed(tmp_path: Path) -> None:
    """Replica N listens on --ec-port + N, the header picks the replica, and a wrong rank is refused."""
    producer = Producer(Tower(QWEN2_5_VL))
    pictures = list(held_out_pictures(2, first=970))
    encoded = producer.encode(pictures)
    async with language_worker(QWEN2_5_VL, tmp_path, "--push-wait-timeout", "1", replicas=2) as worker:
        engines = engine_pids(worker)
        answers = []
        for rank, (picture, item) in enumerate(zip(pictures, encoded, strict=True)):
            names = {"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex}
            await producer.push(f"tcp://{HOST}:{worker.ec_port + rank}", item, **names)
            request = rewritten(ask([picture]), [item], [names])
            there = await worker.ask(**request, headers={"X-data-parallel-rank": str(rank)})
            elsewhere = await worker.ask(**request, headers={"X-data-parallel-rank": str(1 - rank)})
            answers.append((there.text, elsewhere.status))
        refused = await worker.ask(text(COLOUR_QUESTION), headers={"X-data-parallel-rank": "2"})
        await worker.until_idle()
    await producer.close()

    assert len(engines) == 2
    assert answers == [(expected_answer([picture]), 500) for picture in pictures]
    assert (refused.status, refused.error["param"]) == (400, "X-data-parallel-rank")


async def test_requests_without_a_rank_are_spread(tmp_path: Path) -> None:
    """Requests that name no replica keep both busy: the numbers of both engines are added in /metrics."""
    async with language_worker(QWEN2_5_VL, tmp_path, replicas=2) as worker:
        tasks = [
            asyncio.create_task(worker.ask(text(COLOUR_QUESTION), max_tokens=2000, ignore_eos=True))
            for _ in range(4)
        ]

        async def all_run() -> bool:
            return await worker.metric("epdctl_sequences", state="running") == 4

        await worker.process.wait_until(all_run, "four sequences run")
        free = await worker.metric("epdctl_kv_bytes", state="free")
        answers = await asyncio.gather(*tasks)
        await worker.until_idle()
        whole = await worker.metric("epdctl_kv_bytes", state="free")

    assert [answer.status for answer in answers] == [200] * 4
    assert whole == 2 * (16 << 20)
    assert free < whole
