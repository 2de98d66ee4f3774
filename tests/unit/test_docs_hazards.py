"""The hazards page names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| (.+?) \|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[^`]+)`")


def rows() -> list[tuple[int, str]]:
    """Return number and test cell of each row."""
    page = (ROOT / "docs" / "hazards.md").read_text()
    return [(int(number), cell) for number, _, cell in ROW.findall(page)]


def test_numbers_run_from_one() -> None:
    """Each hazard has one row, and no number is left out."""
    assert [number for number, _ in rows()] == list(range(1, len(rows()) + 1))
    assert len(rows()) >= 47


def test_named_tests_exist() -> None:
    """A test in the page is a file, and a class or function in it."""
    named = [name for _, cell in rows() for name in TEST.findall(cell)]
    assert [name for name in named if not exists(name)] == []


def exists(name: str) -> bool:
    """Return whether `path::Class::function` is in the tree."""
    path, *parts = name.split("::")
    if not (ROOT / path).is_file():
        return False
    text = (ROOT / path).read_text()
    bare = [part.partition("[")[0] for part in parts]
    return all(re.search(rf"^\s*(async def|def|class) {re.escape(b)}\b", text, re.MULTILINE) for b in bare)


def test_a_filled_cell_names_a_test() -> None:
    """A cell that says anything names a test in the form that is checked."""
    assert [number for number, cell in rows() if cell.strip() and not TEST.search(cell)] == []
