"""Instances as text for a terminal.

Rules of this file: pure; in comes the detail view of the admin API, out come lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = ("ROLE", "STATE", "URL", "MODELS", "DP", "IN FLIGHT", "FAILURES", "LAST PROBE")


def render_list(detail: Mapping[str, Any], now: float) -> str:
    """Return a table with one instance a line, and a line that says whether the whole can serve."""
    rows = [_HEADER, *(_row(instance, now) for instance in detail["instances"])]
    return "\n".join([*_align(rows), "", _verdict(detail)])


def _row(instance: Mapping[str, Any], now: float) -> tuple[str, ...]:
    return (
        instance["role"],
        instance["state"],
        instance["url"],
        ",".join(instance["models"]) or "any",
        str(instance["dp_size"]),
        str(instance["in_flight"]),
        str(instance["consecutive_failures"]),
        _probe(instance["last_probe"], now),
    )


def _probe(probe: Mapping[str, Any] | None, now: float) -> str:
    if probe is None:
        return "none yet"
    cause = f" ({probe['error']})" if probe["error"] else ""
    return f"{probe['outcome']}{cause} {max(0, round(now - probe['at']))} s ago"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _verdict(detail: Mapping[str, Any]) -> str:
    if detail["servable"]:
        return f"topology {detail['topology']}: ready to serve"
    return f"topology {detail['topology']}: not ready, {detail['reason']}"


def render_instance(instance: Mapping[str, Any], now: float) -> str:
    """Return one instance with a fact a line."""
    counts = instance["counts"]
    facts = {
        "url": instance["url"],
        "role": instance["role"],
        "state": f"{instance['state']} for {max(0, round(now - instance['since']))} s",
        "static": "yes" if instance["static"] else "no",
        "generation": instance["generation"],
        "models": ", ".join(instance["models"]) or "any",
        "labels": ", ".join(f"{name}={value}" for name, value in instance["labels"].items()) or "none",
        "dp size": instance["dp_size"],
        "ec addresses": ", ".join(instance["ec_zmq_addrs"]) or "none",
        "kv bootstrap": instance["kv_bootstrap_addr"] or "none",
        "in flight": instance["in_flight"],
        "requests": counts["requests"],
        "failures in a row": instance["consecutive_failures"],
        "unreachable in traffic": counts["unreachable"],
        "probes": ", ".join(f"{count} {outcome}" for outcome, count in counts["probes"].items()) or "none",
        "last probe": _probe(instance["last_probe"], now),
    }
    width = max(map(len, facts))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items())


def find_instance(detail: Mapping[str, Any], url: str) -> Mapping[str, Any] | None:
    """Return the instance of `url` in a detail view."""
    return next((instance for instance in detail["instances"] if instance["url"] == url), None)
