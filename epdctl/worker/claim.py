"""Claims listening addresses for a process that binds them later, so that a second worker is refused at once.

The engine binds an EC control port only when its model is loaded, which takes seconds; a worker that will not
get the port should not load anything.

Rules of this file: a claim is an abstract unix socket (Linux), which ends with the process that holds it.
Nothing is bound on the network for longer than a test of the address.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence


def claim_addresses(host: str, ports: Sequence[int]) -> list[socket.socket]:
    """Return the claims of `host`'s ports, to be kept as long as the worker runs.

    Raises:
        OSError: another worker has claimed one, or somebody listens there; `strerror` names the address.
    """
    claims: list[socket.socket] = []
    for port in ports:
        where = f"cannot listen on {host}:{port}"
        try:
            claims.append(_claim(host, port))
            _try(host, port)
        except OSError as error:
            for claim in claims:
                claim.close()
            raise OSError(error.errno, f"{where}: {error.strerror}") from error
    return claims


def _claim(host: str, port: int) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0epdctl-ec-{host}-{port}")
    except OSError:
        claim.close()
        raise
    return claim


def _try(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
