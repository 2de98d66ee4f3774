"""Claims about the shapes and plans of local deployments."""

from __future__ import annotations

import pytest

from epdctl.domain import Role
from epdctl.local.plan import WorkerOptions, plan_store, plan_workers, ports_needed
from epdctl.local.shape import Shape, parse_shape

pytestmark = pytest.mark.unit

OPTIONS = WorkerOptions(model="models/m", served_model_name="m", device="cpu")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1e1pd", Shape(encode=1, prefill_decode=1)),
        ("3e2pd", Shape(encode=3, prefill_decode=2)),
        ("1e1p1d", Shape(encode=1, prefill=1, decode=1)),
        ("12e3p4d", Shape(encode=12, prefill=3, decode=4)),
        ("2E2PD", Shape(encode=2, prefill_decode=2)),
    ],
)
def test_a_shape_is_read_as_written(text: str, shape: Shape) -> None:
    """XeYpd and XeYpZd name a count for each role, in any case of letters."""
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    "text", ["", "1e", "1pd", "0e1pd", "1e0pd", "1e1p", "1e1p0d", "1e1pd1d", "e1pd", "1e-1pd", " 1e1pd"]
)
def test_what_names_no_complete_topology_is_refused_with_the_grammar(text: str) -> None:
    """Anything that is not a complete topology is refused, and the message shows both forms."""
    with pytest.raises(ValueError, match=r"XeYpd .* or XeYpZd"):
        parse_shape(text)


def test_each_consumer_is_registered_with_its_own_control_address() -> None:
    """Consumers of embeddings carry an EC address, others do not, and no port is used twice."""
    shape = parse_shape("2e2p1d")
    ports = list(range(20000, 20000 + ports_needed(shape)))

    plans = plan_workers(shape, ports, OPTIONS)

    by_role = {role: [p.registration for p in plans if p.registration["role"] == role] for role in Role}
    assert [len(by_role[role]) for role in (Role.ENCODE, Role.PREFILL, Role.DECODE)] == [2, 2, 1]
    assert all(len(body["ec_zmq_addrs"]) == 1 for body in by_role[Role.PREFILL])
    assert not any(body["ec_zmq_addrs"] for body in by_role[Role.ENCODE] + by_role[Role.DECODE])
    used = [int(word) for plan in plans for word in plan.arguments if word.isdigit()]
    assert sorted(used) == ports


def test_only_encoders_get_the_store_of_a_deployment() -> None:
    """A store's master listens on loopback on its own ports; the encode workers are given its address."""
    master = plan_store([20100, 20101])
    shape = parse_shape("2e1p1d")

    plans = plan_workers(shape, range(20000, 20000 + ports_needed(shape)), OPTIONS, "127.0.0.1:20100")

    assert (master.program, master.url) == ("mooncake_master", "http://127.0.0.1:20101")
    assert "--rpc_address=127.0.0.1" in master.arguments and "--rpc_port=20100" in master.arguments
    with_store = [p.arguments[1] for p in plans if "--mooncake-store" in p.arguments]
    assert with_store == ["encode", "encode"]
    assert "--mooncake-store" not in " ".join(plan_workers(shape, range(20000, 20099), OPTIONS)[-1].arguments)


def test_consumers_start_before_the_encoders_that_push_to_them() -> None:
    """Consumers come first, so that an encoder never reports ready with nobody to push to."""
    assert [r.value for r in parse_shape("2e1pd").roles()] == ["prefill_decode", "encode", "encode"]
