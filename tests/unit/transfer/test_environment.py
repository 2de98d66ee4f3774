"""Claims about the environment that Mooncake gets."""

from __future__ import annotations

import pytest

from epdctl.worker.transfer.environment import mooncake_environment, parse_ports

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
