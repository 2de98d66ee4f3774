"""The figures in Markdown, and the targets they are held against.

Rules of this file: pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target: what is measured, what came out, what it must be."""

    figure: str
    value: str
    must: str
    met: bool


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _throughput(found: Mapping[str, Any]) -> str:
    head = ["tower", "images/s bare", "images/s worker", "ratio", "tower ms", "engine CPU ms beside it"]
    head += ["front CPU ms"]
    rows = []
    for name, one in found.items():
        cells = [f"{one[key]:.2f}" for key in ("bare_per_s", "worker_per_s")]
        cells += [f"{one['ratio']:.3f}"]
        cells += [f"{one[key]:.2f}" for key in ("tower_ms", "overhead_ms", "front_cpu_ms")]
        rows.append([name, *cells])
    return _rows(head, rows)


def _hits(found: Mapping[str, Any]) -> str:
    head = ["picture", "first ms", "hit p50 ms", "hit p99 ms", "engine CPU ms", "front CPU ms", "forwards"]
    head += ["arena changed"]
    rows = []
    for name in ("small", "large"):
        one = found[name]
        cells = [f"{one['side']} x {one['side']}"]
        keys = ("miss_ms", "hit_p50_ms", "hit_p99_ms", "engine_cpu_ms", "front_cpu_ms")
        cells += [f"{one[key]:.2f}" for key in keys]
        cells += [f"{one['forwards']:.0f}", "no" if one["arena_unchanged"] else "yes"]
        rows.append(cells)
    size = f"{found['large_bytes'] / MIB:.1f} MiB"
    return (
        _rows(head, rows) + f"\n\nOne copy of the large embedding ({size}): {found['large_copy_ms']:.2f} ms."
    )


def _startup(found: Mapping[str, Any]) -> str:
    names = {
        "worker": "worker, to /health 200",
        "tower": "bare tower and image processor",
        "whole": "bare whole model and image processor",
    }
    ratios = {"tower": found["x_tower"], "whole": found["x_whole"]}
    rows = [
        [names[name], f"{found['seconds'][name]:.2f}", f"{ratios[name]:.2f}" if name in ratios else ""]
        for name in names
    ]
    return _rows(["process", "seconds", "worker / this"], rows)


def _memory(found: Mapping[str, Any]) -> str:
    rows = [
        [name, f"{found[name]['rss'] / MIB:.0f}", f"{found[name]['anonymous'] / MIB:.0f}"]
        for name in ("front", "engine", "whole")
    ]
    text = f"Front and engine together hold {found['x_whole']:.2f} of the whole load's anonymous memory."
    return _rows(["process", "RSS MiB", "of it anonymous"], rows) + f"\n\n{text}"


def _scheduler(found: Mapping[str, Any]) -> str:
    few, many = f"us an item, {found['few']} pending", f"us an item, {found['many']} pending"
    rows = [
        [name, f"{step['few_us']:.2f}", f"{step['many_us']:.2f}", f"{step['ratio']:.2f}"]
        for name, step in found["steps"].items()
    ]
    return _rows(["what", few, many, "ratio"], rows)


_RENDER = {
    "throughput": _throughput,
    "hits": _hits,
    "startup": _startup,
    "memory": _memory,
    "scheduler": _scheduler,
}


def render(name: str, found: Mapping[str, Any]) -> str:
    """Return one part as a table with its name over it."""
    return f"### {name}\n\n{_RENDER[name](found)}"


def judge(results: Mapping[str, Any]) -> list[Verdict]:
    """Return the targets of the parts that were measured."""
    verdicts: list[Verdict] = []

    def hold(figure: str, value: float, must: str, met: bool, digits: int = 2) -> None:
        verdicts.append(Verdict(figure=figure, value=f"{value:.{digits}f}", must=must, met=met))

    if "throughput" in results:
        ratio = results["throughput"]["large"]["ratio"]
        hold("images/s, worker / bare tower", ratio, ">= 0.95", ratio >= 0.95, 3)
    if "hits" in results:
        both = (results["hits"]["small"], results["hits"]["large"])
        forwards = sum(one["forwards"] for one in both)
        hold("forwards of cache hits", forwards, "0", forwards == 0, 0)
        grown = both[1]["engine_cpu_ms"] - both[0]["engine_cpu_ms"]
        bound = results["hits"]["large_copy_ms"] / 2
        is_met = grown < bound and all(one["arena_unchanged"] for one in both)
        hold("engine ms that a hit's size adds", grown, f"< {bound:.2f} (half a copy)", is_met)
    if "startup" in results:
        ratio = results["startup"]["x_tower"]
        hold("start-up, worker / bare load", ratio, "< 1.5", ratio < 1.5)
    if "scheduler" in results:
        for name, step in results["scheduler"]["steps"].items():
            hold(f"cost of an item, many / few ({name})", step["ratio"], "<= 2", step["ratio"] <= 2)
    return verdicts


def targets(verdicts: Sequence[Verdict]) -> str:
    """Return the targets as a table."""
    rows = [[v.figure, v.value, v.must, "met" if v.met else "MISSED"] for v in verdicts]
    return "### targets\n\n" + _rows(["figure", "value", "must be", ""], rows)
