"""An encode worker with its arena in device memory: real process, real Mooncake, a real consumer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.encode_worker import MODELS, Truth, new_id, open_consumer, part, picture, start_worker

pytestmark = [pytest.mark.e2e, pytest.mark.worker]

BOUNDS = (1_000_000, 1_100_000)
"""Pixels; they make a tiny picture give an embedding of more than half a MiB."""


async def test_rows_go_from_the_device_to_the_consumer(tmp_path: Path) -> None:
    """Rows reach the consumer equal to those of the model: new, from the arena, and back from host memory."""
    family = "qwen3_vl"
    pictures = [picture((number, 90, 40), (300, 300)) for number in range(3)]
    size = {"shortest_edge": BOUNDS[0], "longest_edge": BOUNDS[1]}
    options = {"mm_processor_kwargs": {"min_pixels": BOUNDS[0], "max_pixels": BOUNDS[1]}}
    truth = Truth(MODELS / family)
    expected = [truth.rows(data, size=size) for data in pictures]
    flags = ("--cache-bytes", str(2**20), "--cache-dram-bytes", str(8 * 2**20))
    worker = start_worker(tmp_path, *flags, model=family, module="tests.stubs.device_arena_worker")
    try:
        await worker.ready()
        assert worker.process.logs.count("test_arena_on_device") == 1
        async with open_consumer() as consumer:
            for number in (0, 0, 1, 2, 0, 1):
                transfer_id = new_id()
                reply = await worker.encode(
                    part(pictures[number], new_id()),
                    consumer=consumer.address,
                    transfer_ids=[transfer_id],
                    **options,
                )
                (identifier,) = reply.items
                rows = expected[number]
                found = await consumer.rows(transfer_id, identifier, (rows.shape[0], rows.shape[1]))
                torch.testing.assert_close(found, rows)
        assert await worker.metric("epdctl_encode_batch_items_sum") == 3, "nothing was lost on the way"
        assert await worker.metric("epdctl_cache_requests_total", tier="l1", result="hit") >= 1
        assert await worker.metric("epdctl_cache_requests_total", tier="l2", result="hit") >= 1
    finally:
        worker.process.close()
