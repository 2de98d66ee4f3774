"""One batch on the compute thread: tower forward, rows into the arena, digest of what lies there.

Rules of this file: runs on the compute thread and touches nothing but its arguments. A batch that fails is
run again item by item, so that only the item at fault fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epdctl.errors import EncodeFailed
from epdctl.worker.encode.arena_memory import ArenaMemory
from epdctl.worker.encode.layout import ItemLayout
from epdctl.worker.encode.vision import Tower
from epdctl.worker.transfer.arena import Region
from epdctl.worker.transfer.digest import digest_of_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One item of a batch: its float32 pixels as bytes, their layout, and the arena's place for its rows."""

    pixels: memoryview
    layout: ItemLayout
    memory: ArenaMemory
    region: Region


def run_batch(tower: Tower, jobs: Sequence[Job]) -> list[str | EncodeFailed]:
    """Encode `jobs` and return, for each, the blake3 hex of its rows, or why it failed."""
    try:
        return list(_run(tower, jobs))
    except EncodeFailed as failure:
        if len(jobs) == 1:
            return [failure]
        return [result for job in jobs for result in run_batch(tower, [job])]


def _run(tower: Tower, jobs: Sequence[Job]) -> list[str]:
    outputs = tower.encode([(_tensor(job), job.layout) for job in jobs])
    for index, job in enumerate(jobs):
        outputs.copy_rows(index, job.memory.target(job.region.offset, job.region.nbytes))
    tower.fence.wait()
    return [digest_of_parts(job.memory.parts(job.region.offset, job.region.nbytes)) for job in jobs]


def _tensor(job: Job) -> torch.Tensor:
    with warnings.catch_warnings():
        # The received frame is read-only and stays so: the tower only reads its input.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(job.pixels, dtype=torch.float32).view(job.layout.pixel_shape)
