"""Claims about the environment that Mooncake gets."""

from __future__ import annotations

import pytest

from epdctl.worker.transfer.environment import (
    mooncake_environment,
    parse_ports,
    writes_to_ipv6,
    wrong_family,
)

pytestmark = pytest.mark.unit


def test_tcp_is_forced() -> None:
    """With `tcp` Mooncake may not pick an HCA that happens to be there; with `rdma` it may."""
    assert mooncake_environment({}, protocol="tcp")["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP" not in mooncake_environment({}, protocol="rdma")


def test_writes_without_progress_fail_in_five_seconds() -> None:
    """Mooncake's own 30 s would outlast the request."""
    assert mooncake_environment({}, protocol="tcp")["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "5"


def test_the_operators_own_value_wins() -> None:
    """What is set already is not set again."""
    given = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "9", "PATH": "/bin"}

    assert "MC_TCP_PROGRESS_TIMEOUT_SEC" not in mooncake_environment(given, protocol="tcp")


def test_ports_become_mooncakes_range() -> None:
    """`--mooncake-ports` is a range for both of an engine's listeners."""
    wanted = mooncake_environment({}, protocol="tcp", ports=(15000, 15100))

    assert (wanted["MC_MIN_RPC_PORT"], wanted["MC_MAX_RPC_PORT"]) == ("15000", "15100")


@pytest.mark.parametrize(
    ("host", "is_ipv6"),
    [
        ("::1", True),
        ("[2001:db8::7]", True),
        ("fe80::1%eth0", True),
        ("10.0.0.5", False),
        ("", False),
        ("e.x", False),
    ],
)
def test_a_worker_at_an_ipv6_address_speaks_ipv6(host: str, is_ipv6: bool) -> None:
    """Mooncake listens to IPv4 alone unless it is told otherwise, and then nobody reaches such a worker."""
    wanted = mooncake_environment({}, protocol="tcp", host=host)

    assert writes_to_ipv6(wanted) is is_ipv6


@pytest.mark.parametrize(
    ("session", "ipv6", "said"),
    [
        ("[::1]:15000", False, "start this one with MC_USE_IPV6=1"),
        ("10.0.0.5:15000", True, "at an IPv4 address"),
        ("[::1]:15000", True, None),
        ("10.0.0.5:15000", False, None),
        ("gpu7.example:15000", True, None),
        ("gpu7.example:15000", False, None),
    ],
)
def test_sessions_of_the_other_family_are_out_of_reach(session: str, ipv6: bool, said: str | None) -> None:
    """An engine writes to addresses of one family; a name may stand for either."""
    reason = wrong_family(session, ipv6=ipv6)

    assert reason is None if said is None else said in str(reason)


def test_a_range_is_read() -> None:
    """A-B, both ends included."""
    assert parse_ports("15000-15003") == (15000, 15003)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("15000", "A-B"),
        ("a-b", "A-B"),
        ("-15000-15100", "A-B"),
        ("15000-15002", "at least 4"),
        ("15100-15000", "within"),
        ("32768-40000", "Mooncake ignores"),
        ("80-100", "within"),
    ],
)
def test_a_range_that_mooncake_would_not_honour_is_refused(text: str, said: str) -> None:
    """A range that is ignored in silence is worse than none."""
    with pytest.raises(ValueError, match=said):
        parse_ports(text)
