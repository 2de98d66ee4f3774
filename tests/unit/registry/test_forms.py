"""The JSON of the admin API."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.domain import InstanceSpec, Role, Topology
from epdctl.errors import EpdError, InvalidRequest, SchemaViolation
from epdctl.registry.forms import detail_view, list_view, parse_registration
from epdctl.registry.topology import Service
from tests.unit.registry.build import E1, E2, PD1, acquire, fail, new_registry, probe, ready, register, spec

pytestmark = pytest.mark.unit


def body(**fields: Any) -> bytes:
    """Return the JSON of a registration with `fields`."""
    return msgspec.json.encode({"role": "prefill", "url": "http://p9:1"} | fields)


def test_the_shortest_registration() -> None:
    """Role and URL are enough; the URL is normalised."""
    assert parse_registration(b'{"role":"encode","url":"HTTP://E1:8001/"}') == InstanceSpec(
        url=E1, role=Role.ENCODE
    )


def test_all_fields_arrive() -> None:
    """Nothing that a launcher says is lost."""
    parsed = parse_registration(
        body(
            dp_size=2,
            ec_zmq_addrs=["tcp://p9:1", "tcp://p9:2"],
            model="m",
            labels={"group": "a", "zone": "z"},
            kv_bootstrap_addr="http://p9:9/",
        )
    )

    assert (parsed.dp_size, parsed.ec_zmq_addrs, parsed.model) == (2, ("tcp://p9:1", "tcp://p9:2"), "m")
    assert (parsed.labels, parsed.kv_bootstrap_addr) == ((("group", "a"), ("zone", "z")), "http://p9:9")
    assert not parsed.static


@pytest.mark.parametrize(
    "fields",
    [
        {"dp_size": 4, "ec_zmq_addrs": ["tcp://127.0.0.1:5001"] * 3},
        {"dp_size": 0},
        {"dp_size": -1},
        {"dp_size": "2"},
        {"dp_size": 2.5},
        {"dp_size": True},
        {"dp_size": 1_000_000},
        {"ec_zmq_addrs": ["tcp://0.0.0.0:5001"]},
        {"ec_zmq_addrs": ["tcp://host"]},
        {"ec_zmq_addrs": ["tcp://127.0.0.1:99999"]},
        {"ec_zmq_addrs": [""]},
        {"ec_zmq_addrs": "tcp://127.0.0.1:5001"},
        {"dp_size": 2, "ec_zmq_addrs": ["tcp://127.0.0.1:5001", "tcp://127.0.0.1:5001"]},
        {"url": "ftp://127.0.0.1:1"},
        {"url": "http://user:pw@127.0.0.1:1"},
        {"url": "http://127.0.0.1:1/?a=b#c"},
        {"url": None},
        {"role": "Encode"},
        {"role": None},
        {"unknown_field": 1},
        {"static": True},
        {"model": ""},
        {"model": "m" * 513},
        {"labels": {"": "x"}},
        {"labels": {"a": "x" * 300}},
        {"labels": {f"l{n}": "x" for n in range(33)}},
        {"labels": {"kv_connector": "carrier-pigeon"}},
        {"labels": ["a"]},
        {"kv_bootstrap_addr": "p9:9"},
    ],
)
def test_a_broken_schema_is_422(fields: dict[str, Any]) -> None:
    """Unknown fields, wrong types, bad URLs and addresses are refused before anything is stored."""
    with pytest.raises(SchemaViolation) as raised:
        parse_registration(body(**fields))

    assert raised.value.http_status == 422


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"role": "encode", "ec_zmq_addrs": ["tcp://h:1"]}, "ec_zmq_addrs"),
        ({"role": "decode", "ec_zmq_addrs": ["tcp://h:1"]}, "ec_zmq_addrs"),
        ({"role": "encode", "dp_size": 2}, "dp_size"),
    ],
)
def test_what_makes_no_sense_for_the_role_is_400(fields: dict[str, Any], param: str) -> None:
    """Consumer addresses on a role that consumes nothing, and ranks on an encoder, are refused."""
    with pytest.raises(InvalidRequest) as raised:
        parse_registration(body(**fields))

    assert (raised.value.http_status, raised.value.param) == (400, param)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"role": "encode", "url"}', b"[" * 100_000])
def test_what_is_no_json_is_400(data: bytes) -> None:
    """A body that is not JSON is refused as such."""
    with pytest.raises(EpdError) as raised:
        parse_registration(data)

    assert raised.value.http_status in (400, 422)


@given(
    st.dictionaries(
        st.sampled_from(["role", "url", "dp_size", "ec_zmq_addrs", "model", "labels", "x"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
    )
)
def test_any_object_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    """No JSON object makes the parser fail in a way that is not ours."""
    try:
        parse_registration(msgspec.json.encode(fields))
    except EpdError:
        return


def test_list_view_has_the_reference_shape() -> None:
    """The list has every role with the reference's two lists and ours, holding URLs."""
    registry = ready(new_registry(fail_threshold=1), spec(E1), spec(E2))
    fail(registry, E2)
    register(registry, spec(PD1, Role.PREFILL_DECODE))

    view = list_view(registry.views(0.0))

    assert list(view) == ["encode", "prefill", "decode", "prefill_decode"]
    assert view["encode"] == {"live": [E1], "evicted": [E2], "pending": [], "draining": []}
    assert view["prefill_decode"] == {"live": [], "evicted": [], "pending": [PD1], "draining": []}


def test_detail_view_says_everything() -> None:
    """The detail view names state, generation, health, load, topology and why nothing can be served."""
    registry = new_registry()
    register(registry, spec(E1, labels=(("group", "a"),)), now=100.0)
    probe(registry, E1, now=101.0, models=frozenset({"m"}))
    fail(registry, E1, now=102.0)
    acquire(registry, E1)

    view = detail_view(
        registry.views(105.0), Topology.INCOMPLETE, Service(servable=False, reason="why"), 5000.0
    )

    (instance,) = view.pop("instances")
    assert view == {"topology": "incomplete", "servable": False, "reason": "why"}
    assert instance == {
        "url": E1,
        "role": "encode",
        "state": "ready",
        "since": 4996.0,
        "generation": 1,
        "static": False,
        "dp_size": 1,
        "ec_zmq_addrs": [],
        "model": None,
        "models": ["m"],
        "labels": {"group": "a"},
        "kv_bootstrap_addr": None,
        "in_flight": 1,
        "consecutive_failures": 1,
        "last_probe": {"outcome": "unhealthy", "error": None, "at": 1102.0, "latency": 0.01},
        "counts": {"probes": {"healthy": 1, "unhealthy": 1}, "requests": 1, "unreachable": 0},
    }
