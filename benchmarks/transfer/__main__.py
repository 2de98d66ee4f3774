"""GB/s of the producer's end, beside Mooncake alone: `python -m benchmarks.transfer [options]`.

Consumers are processes of their own with the product's receiver. In each round the same bytes go out by
`transfer_sync_write`, by submitted writes with four in flight (whole items, and pieces of 1 MB), and as
pushes: reserve, write, complete and the consumer's take included. `pushed` leaves the digest to be, as for a
vLLM consumer, which ignores it; with `verified` the consumer checks the blake3 of each item before it
publishes it. A ratio is the median over the rounds of (pushed / the best raw way of the case, same round).
Each case is measured with several sets of new processes: where their threads come to run on few cores
decides up to a fifth of every figure, the raw ones too. Both ends collect garbage as engines do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, quietly
from benchmarks.transfer.items import ROW_BYTES, SIZES, TOTAL_BYTES, Case, items_of, shape_of
from benchmarks.transfer.producer import Pushed, Raw, Target, raw_ways
from epdctl import garbage
from epdctl.worker.transfer.environment import mooncake_environment
from epdctl.worker.transfer.memory import HostMemory

ROOT = Path(__file__).resolve().parents[2]
SOURCE_BYTES = 256 * 2**20
MUST = 0.9
JUDGED_FROM = 2**20
"""The target holds for items from this size on, queued for one consumer."""
RAW = ("sync", "submit", "submit-1MB")


def _count(text: str) -> int:
    """Return a number of at least 1, for argparse."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    """Return the numbers of a comma-separated list, for argparse."""
    return [_count(piece) for piece in text.split(",")]


def _sizes(text: str) -> list[int]:
    """Return the KiB of items, for argparse: whole rows, and no larger than the source."""
    row, most = ROW_BYTES // 1024, SOURCE_BYTES // 1024
    for size in (sizes := _counts(text)):
        if size % row or size > most:
            raise argparse.ArgumentTypeError(f"{size} is no multiple of {row} KiB up to {most}")
    return sizes


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="A,B,...",
        default=",".join(str(size // 1024) for size in SIZES),
        help="KiB of an item",
    )
    parser.add_argument(
        "--consumers", type=_counts, metavar="A,B,...", default="1,2,4", help="numbers of consumers"
    )
    parser.add_argument("--rounds", type=_count, default=5, help="rounds with each set of processes")
    parser.add_argument("--sets", type=_count, default=3, help="sets of processes a case is measured with")
    parser.add_argument("--total-mb", type=_count, default=TOTAL_BYTES // 2**20, help="MiB to each consumer")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    parser.add_argument("--gate", action="store_true", help="exit with 1 when the target is missed")
    return parser.parse_args(arguments)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the cases of a run; with several consumers only sizes up to 4 MB, to bound memory."""
    sizes = [size * 1024 for size in options.sizes]
    return [
        Case(nbytes=size, items=items_of(size, options.total_mb * 2**20), consumers=consumers)
        for consumers in options.consumers
        for size in sizes
        if consumers == 1 or size <= 4 * 2**20
    ]


class ConsumerProcess:
    """One `benchmarks.transfer.consumer`."""

    def __init__(self, process: asyncio.subprocess.Process, target: Target) -> None:
        self._process = process
        self.target = target

    async def expect(self, prefix: str, case: Case) -> None:
        """Let it take the items of a round."""
        assert self._process.stdin is not None
        wanted = {"prefix": prefix, "items": case.items, "shape": shape_of(case.nbytes), "dtype": "bfloat16"}
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        await self.hear()

    async def hear(self) -> dict[str, Any]:
        """Return the next line that it says."""
        return await hear(self._process)


async def hear(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Return the next JSON line of `process`."""
    assert process.stdout is not None
    async with asyncio.timeout(120):
        line = await process.stdout.readline()
    if not line:
        raise SystemExit(f"a consumer ended with {await process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


@asynccontextmanager
async def consumer(nbytes: int, *, verify: bool) -> AsyncIterator[ConsumerProcess]:
    """Run a consumer with an arena of `nbytes`."""
    settings = json.dumps({"nbytes": nbytes, "verify": verify})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.transfer.consumer",
        settings,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield ConsumerProcess(process, Target(**await hear(process)))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _push(
    pushed: Pushed, case: Case, consumers: Sequence[ConsumerProcess], targets: Sequence[Target]
) -> float:
    chosen = consumers[: case.consumers]

    async def expect(prefix: str) -> None:
        await asyncio.gather(*(one.expect(prefix, case) for one in chosen))

    async def taken() -> None:
        await asyncio.gather(*(one.hear() for one in chosen))

    return await pushed.push(case, targets, expect, taken)


async def measure(case: Case, rounds: int, sets: int = 1) -> dict[str, list[float]]:
    """Return GB/s of each way, a figure for each of `rounds` rounds with each of `sets` sets of processes."""
    found: dict[str, list[float]] = {}
    for _ in range(sets):
        for name, figures in (await _measure_set(case, rounds)).items():
            found.setdefault(name, []).extend(figures)
    return found


async def _measure_set(case: Case, rounds: int) -> dict[str, list[float]]:
    """Measure with new processes; a round begins with another way each time, an uncounted one warms up."""
    found: dict[str, list[float]] = {}
    memory = HostMemory(min(SOURCE_BYTES, case.items * case.nbytes))
    async with AsyncExitStack() as stack:
        arena = case.items * case.nbytes + 2**20
        consumers = [
            await stack.enter_async_context(consumer(arena, verify=True)) for _ in range(case.consumers)
        ]
        targets = [one.target for one in consumers]
        raw = Raw(memory)
        plain, digested = Pushed(memory, digest=False), Pushed(memory, digest=True)
        ways: dict[str, Callable[[], Awaitable[float]]] = {
            name: partial(asyncio.to_thread, run) for name, run in raw_ways(raw, case, targets).items()
        }
        ways["pushed"] = partial(_push, plain, case, consumers, targets)
        ways["verified"] = partial(_push, digested, case, consumers, targets)
        names = list(ways)
        for number in range(rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds = await ways[name]()
                if number:
                    found.setdefault(name, []).append(case.total_bytes / seconds / 1e9)
        await asyncio.gather(plain.close(), digested.close())
    memory.close()
    return found


def judged(case: Case, rounds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians and ratios of a case."""
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    best = max((name for name in RAW if name in medians), key=lambda name: medians[name])
    ratios = {
        way: statistics.median(ours / raw for ours, raw in zip(rounds[way], rounds[best], strict=True))
        for way in ("pushed", "verified")
    }
    is_judged = case.consumers == 1 and case.nbytes >= JUDGED_FROM
    met = (ratios["pushed"] >= MUST) if is_judged else None
    return {
        "case": case.name,
        "best": best,
        "medians": medians,
        "ratios": ratios,
        "met": met,
        "rounds": rounds,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the figures in Markdown, GB/s."""
    lines = [
        "| items | " + " | ".join(RAW) + " | pushed | x best raw | verified | x best raw | target |",
        "| --- |" + " --- |" * (len(RAW) + 5),
    ]
    verdicts = {True: f">= {MUST}: met", False: f">= {MUST}: missed", None: ""}
    for result in results:
        medians, ratios = result["medians"], result["ratios"]
        cells = [f"{medians[name]:.2f}" if name in medians else "-" for name in RAW]
        for way in ("pushed", "verified"):
            cells += [f"{medians[way]:.2f}", f"{ratios[way]:.2f}"]
        lines.append(f"| {result['case']} | " + " | ".join(cells) + f" | {verdicts[result['met']]} |")
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> int:
    """Measure every case, print the table, and return the exit code."""
    os.environ.update(mooncake_environment(os.environ, protocol="tcp"))
    garbage.collect_seldom(garbage.ENGINE)
    before = machine()
    with quietly():
        results = [
            judged(case, await measure(case, options.rounds, options.sets)) for case in cases_of(options)
        ]
    print(f"{before}; at the end {machine()}\n\n{table(results)}")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": before, "results": results}, indent=1))
    missed = any(result["met"] is False for result in results)
    return 1 if options.gate and missed else 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(run(parse_arguments())))
