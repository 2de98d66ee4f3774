"""Claims of control addresses."""

from __future__ import annotations

import socket

import pytest

from epdctl.worker.claim import claim_addresses
from tests.stubs.ports import free_port, free_ports

pytestmark = pytest.mark.unit
HOST = "127.0.0.1"


def test_a_claimed_address_is_refused_until_the_claim_ends() -> None:
    """Of two workers one gets the address; the error names it; it is free again with the first one's end."""
    port = free_port()
    (first,) = claim_addresses(HOST, [port])
    with pytest.raises(OSError, match=f"{HOST}:{port}"):
        claim_addresses(HOST, [port])
    first.close()

    (second,) = claim_addresses(HOST, [port])
    second.close()


def test_an_address_that_somebody_listens_on_is_refused() -> None:
    """The one that is taken is named, and the claims of its neighbours are given up."""
    ports = free_ports(3)
    with socket.create_server((HOST, ports[2])), pytest.raises(OSError, match=str(ports[2])):
        claim_addresses(HOST, ports)

    for claim in claim_addresses(HOST, ports):
        claim.close()


def test_a_claim_does_not_keep_the_address() -> None:
    """Whoever holds the claim can bind the address, also just after somebody else was connected there."""
    port = free_port()
    with socket.create_server((HOST, port)) as server, socket.create_connection((HOST, port)):
        server.accept()[0].close()
    (claim,) = claim_addresses(HOST, [port])
    with socket.create_server((HOST, port)) as server, claim:
        assert server.getsockname() == (HOST, port)
