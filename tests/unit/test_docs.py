"""Claims about the docs: what exists in the code has its row, and no row is about nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epdctl import errors
from epdctl.metrics import ControlMetrics, WorkerMetrics

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


def _rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table under `heading`."""
    text = (ROOT / "docs" / page).read_text().split(f"## {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def _error_classes() -> list[type[errors.EpdError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [c for c in found if issubclass(c, errors.EpdError) and c is not errors.EpdError]


def test_every_error_code_is_documented_with_its_status() -> None:
    """The error table holds each code with the status that the code answers, and no code twice."""
    rows = _rows("behaviour.md", "Errors")
    documented = {code: row[1] for row in rows for code in re.findall(r"`(\w+)`", row[0])}

    expected = {c.code: str(c.http_status) for c in _error_classes() if c is not errors.NoInstance}
    expected |= {f"no_{stage}_instance": "503" for stage in ("encode", "prefill", "decode")}
    expected |= {"internal": "500", "upstream_refused": "4xx"}

    assert documented == expected


def test_every_metric_is_documented_with_its_labels() -> None:
    """The metrics table holds each metric that a process exposes, with exactly its labels."""
    documented = {
        name: tuple(labels.strip("{}").split(",")) if labels else ()
        for name, labels in re.findall(
            r"`(epdctl_\w+)(\{[\w,]+\})?`", "\n".join(row[0] for row in _rows("operations.md", "Metrics"))
        )
    }

    declared = {}
    for metrics in (ControlMetrics(), WorkerMetrics()):
        for metric in vars(metrics).values():
            if hasattr(metric, "describe"):
                family = next(iter(metric.describe()))
                suffix = "_total" if family.type == "counter" else ""
                declared[family.name + suffix] = tuple(metric._labelnames)

    assert documented == declared


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link of README and docs names a file that exists."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
