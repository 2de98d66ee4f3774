"""The environment that Mooncake must find before it is imported.

    variables = mooncake_environment(os.environ, protocol="tcp", ports=(15000, 15100))
    # into os.environ by the process entry, or into `env` of a process that is started

Rules of this file: plain data in, plain data out; what the operator has set himself wins. Mooncake reads some
of these once per process, so setting them after the import would do nothing in silence. Values are from
measurements of mooncake-transfer-engine 0.3.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv6Address

PROGRESS_TIMEOUT_S = 5
"""A write that makes no progress for this long fails; Mooncake's own default is 30."""

MIN_PORTS = 4
"""Two listeners per engine, and a killed process leaves its ports unusable for a minute."""

EPHEMERAL_FROM = 32768

_IPV6 = "MC_USE_IPV6"
"""With it, at any value, Mooncake listens to both families and writes to IPv6 only; else all is IPv4."""

_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_TIMEOUT_S),
    "MC_TRANSFER_TIMEOUT": "30",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_TCP_SLICE_SIZE": str(2**20),
    # A consumer restarted on the same Mooncake port is otherwise unreachable for ever: its address is cached.
    # Measured by kill -9 and a start on that port: not within 75 s without this, within 10 s at 20, 2 s at 2.
    # The price: Mooncake asks after every consumer it ever knew, and writes a line for each that has left;
    # `native_output` keeps those back.
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "2",
    # A store whose master hangs fails after 2 s instead of 30; a client is set up or not, not tried for 90 s.
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}


def mooncake_environment(
    given: Mapping[str, str], *, protocol: str, host: str = "", ports: tuple[int, int] | None = None
) -> dict[str, str]:
    """Return the variables to set on top of `given` for an engine of `protocol`.

    `host` is what it is reached under, `ports` the range within which it listens.
    """
    wanted = dict(_DEFAULTS)
    if _is_ipv6(host):
        wanted[_IPV6] = "1"
    if protocol == "tcp":
        # With an HCA present Mooncake would pick RDMA in spite of the protocol it is told.
        wanted["MC_FORCE_TCP"] = "1"
    if ports is not None:
        wanted |= {"MC_MIN_RPC_PORT": str(ports[0]), "MC_MAX_RPC_PORT": str(ports[1])}
    return {name: value for name, value in wanted.items() if name not in given}


def writes_to_ipv6(environment: Mapping[str, str]) -> bool:
    """Return whether Mooncake writes to IPv6 addresses, and then to no others; whatever the value is."""
    return _IPV6 in environment


def wrong_family(session: str, *, ipv6: bool) -> str | None:
    """Return why an engine that writes to IPv6, or to IPv4, does not reach `session`; None when it may.

    `session` is Mooncake's `host:port`. A name is not looked up: it may have addresses of both kinds.
    """
    host = session.rpartition(":")[0]
    if _is_ipv6(host) and not ipv6:
        return f"it is at an IPv6 address and this worker writes to IPv4: start this one with {_IPV6}=1"
    if ipv6 and host.replace(".", "").isdigit():
        return f"it is at an IPv4 address and this worker writes to IPv6 ({_IPV6}): give both of one kind"
    return None


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host.strip("[]"))
    except ValueError:
        return False
    return True


def parse_ports(text: str) -> tuple[int, int]:
    """Return the range in `A-B`; raise ValueError with the reason when Mooncake would not honour it."""
    first, dash, last = text.partition("-")
    if not dash or not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise ValueError(f"ports are given as A-B, got '{text}'")
    low, high = int(first), int(last)
    if not 1024 <= low <= high < EPHEMERAL_FROM:
        raise ValueError(
            f"ports must be within 1024-{EPHEMERAL_FROM - 1} (Mooncake ignores others), got {text}"
        )
    if high - low + 1 < MIN_PORTS:
        raise ValueError(f"an engine needs a range of at least {MIN_PORTS} ports, better 50, got {text}")
    return low, high
