"""Finds who an expectation is about and collects its failures.

Rules of this file: exactly one reader takes each expectation; one that nobody takes is a failure by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.cases.expect_client import check_exactly_one, check_step
from tests.cases.expect_process import PROCESS_CHECKS, WORKER_WORDS
from tests.cases.expect_stub import check_consumer, check_file_server, check_upstream
from tests.cases.world import World


async def check_all(world: World) -> list[str]:
    """Return the failures of all of a case's expectations."""
    failures: list[str] = []
    for number, words in enumerate(world.case.expectations):
        found = await check_one(world, world.placeholders.expand(dict(words)))
        failures += [f"expect[{number}] {dict(words)}: {failure}" for failure in found]
    return failures


async def check_one(world: World, words: Mapping[str, Any]) -> list[str]:
    """Return the failures of one expectation; alternatives under `or` may save it."""
    found = await _found(world, words)
    alternatives = words.get("or")
    if found and isinstance(alternatives, Mapping | list):
        listed = alternatives if isinstance(alternatives, list) else [alternatives]
        subject = {key: words[key] for key in ("step", "upstream", "instance") if key in words}
        for alternative in listed:
            if not await _found(world, {**subject, **alternative}):
                return []
    return found


async def _found(world: World, words: Mapping[str, Any]) -> list[str]:
    for word, check in world.extra_checks.items():
        if word in words:
            return [failure async for failure in check(world, words)]
    foreign = WORKER_WORDS & set(words)
    if foreign and not world.extra_checks:
        return [f"{sorted(foreign)} belong to the encode worker's part"]
    for word, check in PROCESS_CHECKS.items():
        if word in words:
            return [failure async for failure in check(world, words)]
    if "exactly_one_of" in words:
        return list(check_exactly_one(world, words))
    if "upstream" in words:
        return list(check_upstream(world, words))
    if "consumer" in words:
        return list(check_consumer(world, words))
    if "fileserver" in words:
        return list(check_file_server(world, words))
    if "step" in words:
        return list(check_step(world, words))
    return [f"nobody understands {sorted(words)}"]
