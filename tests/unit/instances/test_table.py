"""Instances as text."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.domain import ProbeOutcome, Role, Topology
from epdctl.instances.table import find_instance, render_instance, render_list
from epdctl.registry.forms import detail_view
from epdctl.registry.topology import Service
from tests.unit.registry.build import E1, PD1, fail, new_registry, probe, ready, spec

pytestmark = pytest.mark.unit


def detail(*, servable: bool = False) -> dict[str, Any]:
    """Return a detail view, taken at wall-clock 1010, of a ready encoder and a consumer with failures."""
    registry = ready(
        new_registry(), spec(labels=(("group", "a"),)), spec(PD1, Role.PREFILL_DECODE, dp_size=2)
    )
    probe(registry, E1, models=frozenset({"m", "n"}))
    fail(registry, PD1, times=2)
    probe(registry, PD1, ProbeOutcome.INCONCLUSIVE)
    service = Service(servable=servable, reason=None if servable else "no ready encode instance")
    return detail_view(registry.views(10.0), Topology.E_PD, service, 1010.0)


def test_list_is_a_table() -> None:
    """One line an instance, in columns, and a last line about the whole."""
    assert render_list(detail(), 1010.0).splitlines() == [
        "ROLE            STATE  URL              MODELS  DP  IN FLIGHT  FAILURES  LAST PROBE",
        "encode          ready  http://e1:8001   m,n     1   0          0         healthy 10 s ago",
        "prefill_decode  ready  http://pd1:8002  any     2   0          2         inconclusive 10 s ago",
        "",
        "topology e_pd: not ready, no ready encode instance",
    ]


def test_last_line_says_when_all_is_well() -> None:
    """A servable topology is said to be ready."""
    assert render_list(detail(servable=True), 1010.0).endswith("topology e_pd: ready to serve")


def test_an_empty_list() -> None:
    """Nothing registered is a header and the reason."""
    empty = {"topology": "empty", "servable": False, "reason": "no instance is registered", "instances": []}

    assert render_list(empty, 0.0).splitlines()[1:] == [
        "",
        "topology empty: not ready, no instance is registered",
    ]


def test_one_instance_in_full() -> None:
    """Every fact has its line."""
    shown = dict(
        line.split("  ", 1) for line in render_instance(detail()["instances"][0], 1010.0).splitlines()
    )
    shown = {name: value.strip() for name, value in shown.items()}

    assert (shown["url"], shown["state"]) == (E1, "ready for 10 s")
    assert (shown["labels"], shown["probes"], shown["static"]) == ("group=a", "2 healthy", "no")


def test_find() -> None:
    """An instance is found by its URL, a stranger is not."""
    assert find_instance(detail(), PD1)["role"] == "prefill_decode"  # type: ignore[index]
    assert find_instance(detail(), "http://x:1") is None
