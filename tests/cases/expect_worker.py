"""Expectations on a bundled worker: starts, ends, control messages, pushes, embeddings.

Rules of this file: as in `expect_process`; a check judges what the steps recorded.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from tests.cases.expect_process import settles
from tests.cases.verdict import cut
from tests.cases.vocabulary import word_set
from tests.cases.world import World

Failures = AsyncIterator[str]
WORKER_MODIFIERS = word_set("group others_exit_nonzero_within_s stderr_contains max_stall_s max_s")
CLEAN_EXITS = (0, 143, -15)


async def _started(world: World, words: Mapping[str, Any]) -> Failures:
    """Judge one group of workers that were started together."""
    group = world.records.groups[words.get("group", 0)]
    up = [worker for worker in group if worker.healthy]
    if len(up) != words["started"]:
        yield f"{len(up)} of {len(group)} came up: {[worker.process.log_tail(500) for worker in group]}"
    limit = words.get("others_exit_nonzero_within_s")
    for worker in group:
        if worker.healthy or limit is None:
            continue
        took, code = worker.ended_after_s, worker.process.exit_code
        if took is None or took > limit or code in (None, 0):
            yield f"it ended with {code} after {took} s, not with another code within {limit} s"
        if words.get("stderr_contains", "") not in worker.process.stderr:
            yield f"stderr lacks {words['stderr_contains']!r}: {cut(worker.process.stderr)}"


async def _exit_within(world: World, words: Mapping[str, Any]) -> Failures:
    process, signalled = world.process, world.records.stop_signalled_at
    if process is None or signalled is None:
        yield "the worker was never told to stop"
        return
    limit = words["exit_within_s"]

    async def ended() -> bool:
        return process.exit_code is not None

    if not await settles(ended, signalled + limit - time.monotonic()):
        yield f"still running {limit} s after the signal"
    elif process.exit_code not in CLEAN_EXITS:
        yield f"exit code {process.exit_code}"


async def _lost(world: World, words: Mapping[str, Any]) -> Failures:
    """Judge all control messages of the case: each was handled, and none waited too long."""
    if not world.records.control:
        yield "no control messages were sent"
    for what, (lost, stall_s) in world.records.control.items():
        if lost != words["lost"]:
            yield f"{what}: {lost} messages were lost"
        if stall_s > words["max_stall_s"]:
            yield f"{what}: nothing came for {stall_s:.2f} s"


async def _each_push(world: World, words: Mapping[str, Any]) -> Failures:
    pushes = world.records.results["push"]
    if not pushes:
        yield "nothing was pushed"
    for result in pushes:
        if result.reply["push"] != words["each_push"]:
            yield f"push {result.index}: {result.reply}"
        if result.ended - result.started > words.get("max_s", float("inf")):
            yield f"push {result.index} took {result.ended - result.started:.1f} s"
    names = [session for result in pushes for session in result.reply["sessions"]]
    if len(set(names)) < 2:
        yield f"the segment names are not distinct: {set(names)}"


async def _process(world: World, words: Mapping[str, Any]) -> Failures:
    for process in world.living():
        if words["process"] != "alive" or process.exit_code is not None:
            yield f"{process.name} ended with {process.exit_code}, not {words['process']}"


WORKER_CHECKS: dict[str, Callable[[World, Mapping[str, Any]], Failures]] = {
    "started": _started,
    "exit_within_s": _exit_within,
    "lost": _lost,
    "each_push": _each_push,
    "process": _process,
}
