"""Runs the console blocks of a page as one shell session and compares each command's output.

Rules of this file: a line that starts with `$ ` is a command, the lines up to the next are what it prints,
`…` standing for anything. Ports of the page are mapped to free ones. One bash runs all blocks, so that
variables and background jobs live from one block to the next.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_END = "__end_of_command__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the page, and what the page says it prints."""

    line: str
    printed: str


def commands_under(page: str, heading: str) -> tuple[Command, ...]:
    """Return the commands of the console blocks between `heading` and the next heading of its level."""
    level = heading.split(" ", 1)[0]
    section = re.split(rf"^{level} ", page.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found: list[Command] = []
    for block in _BLOCK.findall(section):
        for chunk in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, printed = chunk.partition("\n")
            found.append(Command(line=line, printed=printed.strip()))
    return tuple(found)


def with_ports(text: str, ports: Mapping[int, int]) -> str:
    """Return `text` with the page's ports replaced."""
    return re.sub(r"\b\d{4,5}\b", lambda m: str(ports.get(int(m[0]), int(m[0]))), text)


def matches(printed: str, page: str) -> bool:
    """Say whether `printed` is what the page shows, `…` standing for anything."""
    pattern = ".*".join(re.escape(piece) for piece in page.split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def left_in(folder: Path) -> list[str]:
    """Return the files that a walk-through has left and that git does not ignore."""
    found = [path.name for path in folder.iterdir() if not path.is_symlink()]
    return sorted(name for name in found if name != ".run" and not name.endswith(".log"))


class Shell:
    """One bash in its own process group; `run` returns what a command printed on stdout."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Shell:
        self._process = await asyncio.create_subprocess_exec(
            "bash",
            cwd=self._folder,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=2**22,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.wait_for(self._process.wait(), 10)

    async def run(self, line: str, deadline_s: float) -> str:
        """Run `line` and return its stdout; TimeoutError when it takes longer than `deadline_s`."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\nprintf '\\n%s\\n' {_END}\n".encode())
        await self._process.stdin.drain()
        collected: list[str] = []
        async with asyncio.timeout(deadline_s):
            while (raw := await self._process.stdout.readline()).strip() != _END.encode():
                assert raw, f"the shell ended in: {line}"
                collected.append(raw.decode())
        return "".join(collected).strip()
