"""From raw rounds to figures, ratios and tables.

Rules of this file: pure; a ratio is the median over the rounds of (peer / reference in the same round), so
that both sides of it saw the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.proxy.workloads import TARGETS, Mode, Target, Workload

DIRECT, REFERENCE = "direct", "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One peer's figures in one round; times in milliseconds, `cpu_ms` per request (per chunk of streams)."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float = 0.0
    rss_mb: float = 0.0
    mb_per_s: float = 0.0
    received_kb: Mapping[str, float] = field(default_factory=dict)
    errors: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All rounds of one workload, by peer."""

    workload: Workload
    rounds: Mapping[str, Sequence[Round]]

    def failure(self, peer: str) -> str | None:
        """Return what went wrong for a peer, or None."""
        broken = [r for r in self.rounds[peer] if r.errors]
        return f"{broken[0].errors} errors, {broken[0].last_error[:80]}" if broken else None

    def figure(self, peer: str, name: str) -> float | None:
        """Return the median of a figure; `added_…` is what the peer adds to having no proxy."""
        return _median(self._values(peer, name))

    def ratio(self, peer: str, name: str) -> float | None:
        """Return the median over the rounds of peer / reference, or None without a reference."""
        if REFERENCE not in self.rounds or peer == DIRECT:
            return None
        pairs = zip(self._values(peer, name), self._values(REFERENCE, name), strict=False)
        return _median(own / other for own, other in pairs if other > 0)

    def _values(self, peer: str, name: str) -> list[float]:
        if not name.startswith("added_"):
            return [getattr(r, name) for r in self.rounds[peer]]
        plain = name.removeprefix("added_")
        pairs = zip(self._values(peer, plain), self._values(DIRECT, plain), strict=False)
        return [own - without for own, without in pairs]


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None


COLUMNS: tuple[tuple[str, str, bool], ...] = (
    ("per_s", "1/s", True),
    ("p50_ms", "p50 ms", False),
    ("p99_ms", "p99 ms", True),
    ("added_p50_ms", "+p50 ms", True),
    ("added_p99_ms", "+p99 ms", True),
    ("cpu_ms", "CPU ms", True),
    ("mb_per_s", "MB/s", False),
    ("rss_mb", "RSS MiB", True),
)
"""Figure, heading, and whether its ratio to the reference is shown beside it."""


def table(result: Result) -> str:
    """Return one workload as a Markdown table; ratios stand in brackets."""
    head = ["peer", *(heading for _, heading, _ in COLUMNS), "KB to E/P/D"]
    rows = [_row(result, peer) for peer in result.rounds]
    lines = [f"### {result.workload.name} ({_describe(result.workload)})", "", _line(head)]
    lines += [_line(["---"] * len(head)), *(_line(row) for row in rows)]
    return "\n".join(lines)


def _describe(workload: Workload) -> str:
    topology = "E+P+D" if workload.separate_prefill else "E+PD"
    unit = "requests" if workload.mode is Mode.REQUESTS else "chunks"
    return f"{topology}, concurrency {workload.concurrency}, counted in {unit}"


def _row(result: Result, peer: str) -> list[str]:
    failure = result.failure(peer)
    if failure is not None:
        return [peer, f"failed: {failure}", *[""] * len(COLUMNS)]
    cells = [peer]
    for name, _, with_ratio in COLUMNS:
        is_empty = peer == DIRECT and name in ("added_p50_ms", "added_p99_ms", "cpu_ms", "rss_mb")
        text = "-" if is_empty else _number(result.figure(peer, name))
        ratio = result.ratio(peer, name) if with_ratio and peer != REFERENCE else None
        cells.append(text if ratio is None else f"{text} ({ratio:.2f})")
    received = result.rounds[peer][-1].received_kb
    return [*cells, "/".join(f"{received.get(role, 0):.1f}" for role in ("encode", "prefill", "decode"))]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One target beside what was measured; `ratio` is None when the workload was not run."""

    target: Target
    ratio: float | None
    value: float | None

    def is_missed(self, slack: float = 1.0) -> bool:
        """Whether the target was measured and is missed by more than a factor of `slack`."""
        if self.ratio is None:
            return False
        return not self.target.met(self.ratio * slack if self.target.at_least else self.ratio / slack)


def judge(results: Sequence[Result], peer: str) -> list[Judgement]:
    """Return every target with what a peer reached of it."""
    by_name = {result.workload.name: result for result in results if peer in result.rounds}

    def measured(target: Target, how: Callable[[Result], float | None]) -> float | None:
        found = by_name.get(target.workload)
        return how(found) if found is not None and found.failure(peer) is None else None

    return [
        Judgement(
            target=target,
            ratio=measured(target, lambda result, t=target: result.ratio(peer, t.figure)),  # type: ignore[misc]
            value=measured(target, lambda result, t=target: result.figure(peer, t.figure)),  # type: ignore[misc]
        )
        for target in TARGETS
    ]


def target_table(judgements: Sequence[Judgement]) -> str:
    """Return the targets as a Markdown table."""
    lines = [_line(["workload", "figure", "value", "x reference", "must", "stretch", ""])]
    lines.append(_line(["---"] * 7))
    for j in judgements:
        sign = ">=" if j.target.at_least else "<="
        stretch = f"{sign} {j.target.stretch:g}" + (" MiB" if j.target.stretch_is_absolute else "")
        verdict = "not run" if j.ratio is None else "**missed**" if j.is_missed() else _stretch_verdict(j)
        ratio = "-" if j.ratio is None else f"{j.ratio:.2f}"
        cells = [j.target.workload, j.target.figure, _number(j.value), ratio]
        lines.append(_line([*cells, f"{sign} {j.target.must:g}", stretch, verdict]))
    return "\n".join(lines)


def _stretch_verdict(judgement: Judgement) -> str:
    target = judgement.target
    reached = judgement.value if target.stretch_is_absolute else judgement.ratio
    if reached is None:
        return "met"
    beyond = reached >= target.stretch if target.at_least else reached <= target.stretch
    return "met, and stretch" if beyond else "met"
