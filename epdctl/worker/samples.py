"""Metric samples that cross a process border: the front shows its engines' numbers beside its own.

Rules of this file: counters and histograms of dead engine processes are kept and added, so that a restart
never makes a counter fall; gauges are those of living processes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest

_ADDED = frozenset({"counter", "histogram"})


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One exposed line: its name, its labels as sorted pairs, its value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(msgspec.Struct, array_like=True, frozen=True):
    """One metric with all its samples."""

    name: str
    type: str
    documentation: str
    samples: tuple[Sample, ...]


def snapshot(registry: CollectorRegistry) -> list[Family]:
    """Return every sample of `registry` now; creation times are left out."""
    return [_family(metric) for metric in registry.collect()]


def _family(metric: Metric) -> Family:
    samples = tuple(
        Sample(s.name, tuple(sorted(s.labels.items())), s.value)
        for s in metric.samples
        if not s.name.endswith("_created")
    )
    return Family(metric.name, metric.type, metric.documentation, samples)


def merge(parts: Iterable[Iterable[Family]]) -> list[Family]:
    """Return one family per name: samples with the same name and labels are added up."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for part in parts:
        for family in part:
            families.setdefault(family.name, family)
            totals = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, sample.labels)
                totals[key] = totals.get(key, 0.0) + sample.value
    return [_with_samples(family, sums[name]) for name, family in families.items()]


def _with_samples(family: Family, totals: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]) -> Family:
    samples = tuple(Sample(name, labels, value) for (name, labels), value in totals.items())
    return Family(family.name, family.type, family.documentation, samples)


def lasting(families: Iterable[Family]) -> list[Family]:
    """Return what outlives a process: its counters and histograms."""
    return [family for family in families if family.type in _ADDED]


class _Merged:
    """Looks like a collector to prometheus_client's text writer."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def render(families: Iterable[Family]) -> bytes:
    """Return the exposition text of `families`."""
    return generate_latest(_Merged(families))
