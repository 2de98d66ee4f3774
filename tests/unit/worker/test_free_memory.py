"""Memory that is not there ends a start, by name and number."""

from __future__ import annotations

from pathlib import Path

import pytest

from epdctl.worker.engine import StartFailed
from epdctl.worker.free_memory import available_bytes, check_memory

pytestmark = pytest.mark.unit


class Machine:
    """A machine with 1000 KiB, in files as the kernel writes them."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            "MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\nHuge 1\n"
        )

    def group(self, path: str, *, limit: str, used: int, files: int = 0) -> None:
        """Add a cgroup."""
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")

    def enter(self, path: str) -> None:
        """Put this process into a cgroup."""
        (self.proc / "self" / "cgroup").write_text(f"1:name=systemd:/\n0::/{path}\n")

    @property
    def available(self) -> int | None:
        """What is there."""
        return available_bytes(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return such a machine."""
    return Machine(tmp_path)


def test_a_machine_without_limits(machine: Machine) -> None:
    """What the kernel says is available."""
    assert machine.available == 1000 * 1024


@pytest.mark.parametrize("inside", ["", "a", "a/b"])
def test_the_tightest_limit_counts(machine: Machine, inside: str) -> None:
    """A cgroup's limit, and that of one around it; what its files hold can be had."""
    machine.enter(inside)
    machine.group("", limit="max", used=10)
    machine.group("a", limit="9000", used=4000, files=500)
    machine.group("a/b", limit="max", used=10)

    assert machine.available == (5500 if inside else 1000 * 1024)


def test_a_full_group_has_nothing(machine: Machine) -> None:
    """More used than the limit is nothing left, not less."""
    machine.group("", limit="100", used=200)

    assert machine.available == 0


def test_what_is_not_known_is_no_reason(tmp_path: Path) -> None:
    """Where none of these files is, everything is let through."""
    assert available_bytes(tmp_path, tmp_path) is None
    check_memory([("--cache-bytes", 2**70)], proc=tmp_path, cgroups=tmp_path)


@pytest.mark.parametrize(
    ("wanted", "times", "text"),
    [
        (
            [("--cache-bytes", 2_000_000)],
            1,
            "--cache-bytes 2000000: that takes 2000000 bytes of memory, and 1024000 are available here",
        ),
        (
            [("--a", 600_000), ("--b", 0), ("--c", 100_000)],
            2,
            "--a 600000 and --c 100000 for each of 2 engines: that takes 1400000 bytes of memory",
        ),
    ],
)
def test_too_much_is_named(machine: Machine, wanted: list[tuple[str, int]], times: int, text: str) -> None:
    """Flags, asked and available bytes stand in the text."""
    with pytest.raises(StartFailed) as failure:
        check_memory(wanted, times=times, proc=machine.proc, cgroups=machine.cgroups)

    assert text in str(failure.value)


def test_what_fits_is_let_through(machine: Machine) -> None:
    """To the last byte."""
    check_memory([("--a", 512_000)], times=2, proc=machine.proc, cgroups=machine.cgroups)
