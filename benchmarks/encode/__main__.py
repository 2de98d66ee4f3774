"""The encode worker beside the bare tower, in one run: `python -m benchmarks.encode [options]`.

Parts (`--parts`, all by default): `throughput` images a second of the real worker against a loop of the same
tower over the same batches · `hits` what a cached picture costs · `startup` to `/health` 200 against a bare
load · `memory` against a load of the whole model · `scheduler` the engine's own decisions with many items
pending. Checkpoints with random weights are made by the benchmark. Two of anything take turns; figures are
medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.encode import tables
from benchmarks.encode.checkpoint import TINY, TINY_WIDTH, Shape, write_checkpoint
from benchmarks.encode.hits import cache_hits
from benchmarks.encode.scheduling import LARGE, scheduling
from benchmarks.encode.startup import resident, start_up
from benchmarks.encode.throughput import Load, throughput
from benchmarks.machine import machine, quietly

PARTS = ("throughput", "hits", "startup", "memory", "scheduler")
Part = Callable[[], Awaitable[dict[str, Any]]]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encode", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--scheduler", action="store_true", help="short for --parts scheduler")
    parser.add_argument("--rounds", type=int, default=5, help="of throughput; start-up takes 3 at most")
    parser.add_argument("--images", type=int, default=32, help="of a round, all pending at once")
    parser.add_argument("--side", type=int, default=112, help="pixels of a side of these images")
    parser.add_argument("--batch", type=int, default=16, help="images of a batch")
    parser.add_argument("--hidden", type=int, default=1280, help="of the random tower")
    parser.add_argument("--depth", type=int, default=2, help="layers of the random tower")
    parser.add_argument("--hits", type=int, default=200, help="requests for a cached image")
    parser.add_argument("--width", type=int, default=4096, help="elements of a cached row")
    parser.add_argument("--pending", type=int, default=LARGE, help="items in the scheduler's larger queue")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--gate", action="store_true", help="exit with 1 when a target is missed")
    return parser.parse_args(arguments)


async def _hits(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    # A cheap tower with wide rows: what counts is the size of what it gives.
    write_checkpoint(folder, Shape(hidden=80, depth=1, language_layers=1, language_hidden=options.width))
    return await cache_hits(folder, (options.side, 12 * options.side), options.hits)


async def _scheduling(pending: int) -> dict[str, Any]:
    return scheduling(large=pending)


def parts_of(options: argparse.Namespace, large: Path) -> dict[str, Part]:
    """Return the parts that are asked for; `large` is the checkpoint with the random tower."""
    load = Load(images=options.images, side=options.side, batch=options.batch, rounds=options.rounds)
    small_load = Load(images=4 * options.batch, side=options.side, batch=options.batch, rounds=options.rounds)

    async def both() -> dict[str, Any]:
        return {
            "large": await throughput(large, load, width=Shape().language_hidden),
            "tiny": await throughput(TINY, small_load, width=TINY_WIDTH),
        }

    every: dict[str, Part] = {
        "throughput": both,
        "hits": partial(_hits, large.with_name("wide"), options),
        "startup": partial(start_up, min(3, options.rounds)),
        "memory": partial(resident, large),
        "scheduler": partial(_scheduling, options.pending),
    }
    asked = ["scheduler"] if options.scheduler else options.parts.split(",")
    unknown = [name for name in asked if name not in every]
    if unknown:
        raise SystemExit(f"--parts: no part {unknown[0]} (there are {', '.join(PARTS)})")
    return {name: every[name] for name in asked}


async def run(options: argparse.Namespace) -> int:
    """Measure, print the tables, and return the exit code."""
    before = machine()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="epdctl-bench-") as folder:
        large = Path(folder) / "model"
        parts = parts_of(options, large)
        if {"throughput", "memory"} & set(parts):
            write_checkpoint(large, Shape(hidden=options.hidden, depth=options.depth))
        with quietly():
            for name, part in parts.items():
                results[name] = await part()
    verdicts = tables.judge(results)
    text = "\n\n".join(tables.render(name, found) for name, found in results.items())
    print(f"{before}; at the end {machine()}\n\n{text}\n\n{tables.targets(verdicts)}")
    if options.json is not None:
        whole = {"machine": before, "results": results, "targets": [asdict(v) for v in verdicts]}
        options.json.write_text(json.dumps(whole, indent=1, default=asdict))
    return 1 if options.gate and not all(verdict.met for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(run(parse_arguments())))
