"""Claims about the operations page: its walk-through of the embedding cache is what happens."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.walkthrough import Command, Shell, commands_under, left_in, matches, with_ports
from tests.stubs.ports import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
METRICS_S = 30.0


async def test_the_cache_walk_through_prints_what_the_page_says(tmp_path: Path) -> None:
    """Start, second sight, eviction, promotion, another worker's hit and a lost store show in `/metrics`."""
    page = (ROOT / "docs" / "operations.md").read_text()
    ports = dict(zip((8001, 8002, 50051, 9103), free_ports(4), strict=True))
    for name in ("models", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    commands = commands_under(page, "## The embedding cache, step by step")

    assert len(commands) > 15
    async with Shell(tmp_path, environment) as shell:
        for command in commands:
            line, expected = with_ports(command.line, ports), with_ports(command.printed, ports)
            printed = await until_it_matches(shell, command, line, expected)
            assert matches(printed, expected), f"{line}\nprinted {printed}\npage    {expected}"

    assert left_in(tmp_path) == []


async def until_it_matches(shell: Shell, command: Command, line: str, expected: str) -> str:
    """Run a line; one that shows metrics is run again, since a busy engine's may be a second old."""
    deadline = asyncio.get_running_loop().time() + METRICS_S
    while True:
        printed = await shell.run(line, deadline_s=120)
        is_late = asyncio.get_running_loop().time() > deadline
        if is_late or not command.line.startswith("cache ") or matches(printed, expected):
            return printed
        await asyncio.sleep(0.2)
