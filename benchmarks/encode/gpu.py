"""The whole encode worker on a GPU machine, in under eight minutes; `scripts/gpu-check` runs it.

    scripts/gpu-check [--device cuda:0] [--compile] [--json FILE]
    scripts/gpu-check --device cpu          # the same steps, small, on a machine without a GPU

Steps: what is missing is named (exit code 2) · the worker's end-to-end tests, with the engine on the device
and the truth on the CPU · images a second for each image size beside the bare tower, with a GPU once more
with the arena in its memory · pushed GB/s beside Mooncake alone · cache-hit latency. Exit code 1 when a test
fails, a step does not end, or the worker does not start with its arena on the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.encode import tables
from benchmarks.encode.checkpoint import Shape, write_checkpoint
from benchmarks.encode.hits import cache_hits
from benchmarks.encode.throughput import Load, Seeds, in_turns, open_world, summary
from benchmarks.encode.world import ROOT
from benchmarks.machine import machine, quietly
from benchmarks.transfer.__main__ import judged, measure
from benchmarks.transfer.__main__ import table as transfer_table
from benchmarks.transfer.items import Case
from epdctl.worker.transfer.environment import mooncake_environment

MIB = 2**20
TESTS = (
    "tests/e2e/test_encode_worker.py",
    "tests/e2e/test_encode_worker_arena.py",
    "tests/unit/encode/test_device_arena.py",
)
NEEDED = ("torch", "transformers", "mooncake", "pytest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured: the tower, loads by image size, transfer cases, and the tests' time.

    `device_loads` are run with the arena in device memory.
    """

    shape: Shape
    loads: tuple[Load, ...]
    cases: tuple[Case, ...]
    arena_bytes: int
    media_threads: int
    hits: int
    hit_sides: tuple[int, int]
    device_loads: tuple[Load, ...] = ()
    tests_s: float = 200.0
    step_s: float = 90.0


GPU = Plan(
    shape=Shape(hidden=1280, depth=32, language_layers=1),
    loads=tuple(
        Load(images=images, side=side, batch=16, rounds=3)
        for side, images in ((112, 256), (224, 128), (448, 64), (896, 32))
    ),
    cases=(Case(nbytes=MIB, items=128, consumers=1), Case(nbytes=16 * MIB, items=16, consumers=1)),
    arena_bytes=1024 * MIB,
    media_threads=8,
    hits=200,
    hit_sides=(112, 896),
    device_loads=(Load(images=64, side=448, batch=16, rounds=3),),
)
CPU = Plan(
    shape=Shape(hidden=160, depth=2, language_layers=1),
    loads=(Load(images=8, side=56, batch=4, rounds=1), Load(images=8, side=112, batch=4, rounds=1)),
    cases=(Case(nbytes=MIB, items=16, consumers=1),),
    arena_bytes=64 * MIB,
    media_threads=2,
    hits=20,
    hit_sides=(56, 112),
)


def missing(device: str) -> list[str]:
    """Return what this machine lacks for the check, each with what to do."""
    lacking = [f"the Python package '{name}'" for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking or device == "cpu":
        return lacking
    from epdctl.worker.encode.devices import find_device
    from epdctl.worker.engine import StartFailed

    try:
        find_device(device)
    except StartFailed as error:
        return [str(error)]
    return []


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a run."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__, formatter_class=form)
    parser.add_argument("--device", default="cuda:0", help="cuda, cuda:N, or cpu for a small run")
    parser.add_argument("--compile", action="store_true", help="start the measured worker with --compile")
    parser.add_argument("--no-tests", action="store_true", help="only measure")
    parser.add_argument("--json", type=Path, help="write every figure here")
    return parser.parse_args(arguments)


async def run_tests(device: str, limit_s: float) -> dict[str, Any]:
    """Run the worker's end-to-end tests with its engine on `device`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "EPDCTL_DEVICE": device},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    except TimeoutError:
        process.terminate()
        await process.wait()
        output = b"not ended in time"
    text = output.decode(errors="replace")
    passed = process.returncode == 0
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return {"passed": passed, "summary": last, "seconds": time.monotonic() - began, "output": text}


async def by_size(folder: Path, plan: Plan, device: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return images a second of worker and bare tower for each image size."""
    rows = max(load.rows for load in plan.loads)
    batch = max(load.batch for load in plan.loads)
    wanted = ["--max-batch-items", str(batch), "--max-batch-tokens", str(batch * rows)]
    wanted += ["--media-threads", str(plan.media_threads), *flags]
    width = plan.shape.language_hidden
    found, seeds = {}, Seeds()
    async with open_world(
        folder, width=width, flags=wanted, arena_bytes=plan.arena_bytes, device=device
    ) as world:
        for load in plan.loads:
            rounds = await in_turns(world, load, seeds)
            found[f"{load.side} x {load.side}"] = summary(rounds, load.images)
        graphs = (await world.worker.metrics(world.session)).get("epdctl_tower_compiled_graphs", 0.0)
    return {"sizes": found, "compiled_graphs": graphs}


async def with_device_arena(folder: Path, plan: Plan, device: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return what `by_size` does with the arena in device memory, or `failed`: why there is nothing."""
    try:
        async with asyncio.timeout(plan.step_s + (150 if "--compile" in flags else 0)):
            loads = replace(plan, loads=plan.device_loads)
            return await by_size(folder, loads, device, [*flags, "--arena", "device"])
    except (SystemExit, TimeoutError) as error:
        return {"failed": str(error) or "not ended in time"}


async def check(options: argparse.Namespace) -> int:
    """Run all steps, print the tables, and return the exit code."""
    lacking = missing(options.device)
    if lacking:
        print("\n".join(f"missing: {what}" for what in lacking), file=sys.stderr)
        return 2
    os.environ.update(mooncake_environment(os.environ, protocol="tcp"))
    plan = CPU if options.device == "cpu" else GPU
    flags = ["--compile"] if options.compile else []
    before, began = machine(), time.monotonic()
    results: dict[str, Any] = {}
    if not options.no_tests:
        results["tests"] = await run_tests(options.device, plan.tests_s)
        _show_tests(results["tests"])
    with tempfile.TemporaryDirectory(prefix="epdctl-gpu-") as name, quietly():
        folder = Path(name) / "model"
        write_checkpoint(folder, plan.shape)
        async with asyncio.timeout(2 * plan.step_s + (300 if options.compile else 0)):
            results["throughput"] = await by_size(folder, plan, options.device, flags)
        if plan.device_loads:
            results["device_arena"] = await with_device_arena(folder, plan, options.device, flags)
        async with asyncio.timeout(plan.step_s):
            results["transfer"] = [judged(case, await measure(case, 3)) for case in plan.cases]
        async with asyncio.timeout(plan.step_s):
            results["hits"] = await cache_hits(folder, plan.hit_sides, plan.hits, options.device)
    _show(options, before, results, time.monotonic() - began)
    passed = options.no_tests or results["tests"]["passed"]
    return 0 if passed and "failed" not in results.get("device_arena", {}) else 1


def _show_tests(tests: dict[str, Any]) -> None:
    if not tests["passed"]:
        print(tests["output"])
    print(f"tests: {'passed' if tests['passed'] else 'FAILED'}, {tests['summary']}\n", flush=True)


def _show_device_arena(found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"arena in device memory: FAILED, {found['failed']}", end="\n\n")
        return
    sizes = {f"{name}, arena on the device": one for name, one in found["sizes"].items()}
    print(tables.render("throughput", sizes), end="\n\n")


def _show(options: argparse.Namespace, before: str, results: dict[str, Any], seconds: float) -> None:
    graphs = results["throughput"]["compiled_graphs"]
    compiled = f"compiled ({graphs:.0f} graphs)" if graphs else "not compiled"
    print(f"{before}; device {options.device}, tower {compiled}; {seconds:.0f} s in all\n")
    print(tables.render("throughput", results["throughput"]["sizes"]), end="\n\n")
    if "device_arena" in results:
        _show_device_arena(results["device_arena"])
    print(f"### push, GB/s\n\n{transfer_table(results['transfer'])}", end="\n\n")
    print(tables.render("hits", results["hits"]))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": before, **results}, indent=1))


if __name__ == "__main__":
    raise SystemExit(asyncio.run(check(parse_arguments())))
