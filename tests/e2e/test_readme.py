"""Claims about the README: what it shows is what happens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.e2e.walkthrough import Command, Shell, commands_under, left_in, matches, with_ports
from tests.stubs.ports import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


def test_a_page_is_read_as_commands_and_what_they_print() -> None:
    """Commands start with a dollar sign, output follows, an ellipsis stands for anything."""
    page = "## A\n```console\n$ one\nx\ny\n$ two\n```\n## B\n```console\n$ three\n```\n"

    found = commands_under(page, "## A")

    assert found == (Command(line="one", printed="x\ny"), Command(line="two", printed=""))
    assert matches("a 17 b", "a … b")
    assert not matches("a 17 c", "a … b")


async def test_every_line_of_the_walk_through_prints_what_the_readme_says(tmp_path: Path) -> None:
    """The README's walk-through runs as written, with real processes, and prints what it shows."""
    page = (ROOT / "README.md").read_text()
    ports = dict(zip((8000, 8001, 8002, 8003, 14579), free_ports(5), strict=True))
    for name in ("models", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "EPDCTL_URL": f"http://127.0.0.1:{ports[8000]}",
    }

    commands = commands_under(page, "## Walk-through")

    assert len(commands) > 15
    async with Shell(tmp_path, environment) as shell:
        for command in commands:
            printed = await shell.run(with_ports(command.line, ports), deadline_s=90)
            expected = with_ports(command.printed, ports)
            assert matches(printed, expected), f"{command.line}\nprinted {printed}\nREADME  {expected}"

    assert left_in(tmp_path) == []
