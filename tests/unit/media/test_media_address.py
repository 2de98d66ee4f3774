"""Which media URLs and addresses may be fetched."""

from __future__ import annotations

import pytest

from epdctl.errors import EpdError, InvalidRequest, MediaUnavailable, UnsupportedMedia
from epdctl.worker.media_address import (
    FetchRules,
    check_addresses,
    check_host,
    is_public,
    parse_media_url,
)

pytestmark = pytest.mark.unit

ANY = FetchRules()
LISTED = FetchRules(allowed_hosts=("Images.example.com", "10.0.0.7"))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "192.0.2.1",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2002:a00:1::",
        "2001:db8::1",
        "not an address",
    ],
)
def test_inner_addresses_are_not_public(address: str) -> None:
    """Loopback, private, link-local, metadata, shared, multicast and reserved ranges are refused, also when
    they are wrapped in an IPv6 address."""
    assert is_public(address) is False


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:2800:21f:cb07::1", "::ffff:8.8.8.8"])
def test_public_addresses_are_public(address: str) -> None:
    """Addresses of the internet may be fetched."""
    assert is_public(address) is True


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("ftp://example.com/x", UnsupportedMedia),
        ("gopher://example.com/x", UnsupportedMedia),
        ("javascript:alert(1)", UnsupportedMedia),
        ("/etc/passwd", UnsupportedMedia),
        ("http:///x", InvalidRequest),
        ("http://user@example.com/", InvalidRequest),
        ("http://user:pw@example.com/", InvalidRequest),
        ("http://example.com:99999/", InvalidRequest),
        ("http://[::1/", InvalidRequest),
        ("http://a..b/", InvalidRequest),
        (f"http://{'a' * 64}.example/", InvalidRequest),
        ("http://exa mple.com/", InvalidRequest),
        ("http://example.com\\@evil/", InvalidRequest),
        ("\thttp://example.com/", InvalidRequest),
        ("http://example.com/\r\nHost: x", InvalidRequest),
    ],
)
def test_malformed_url_is_refused(url: str, kind: type[EpdError]) -> None:
    """URLs that libraries read in different ways are refused before anything reads them."""
    with pytest.raises(kind):
        parse_media_url(url)


def test_host_is_normalised() -> None:
    """Case, brackets, a final dot and the default port do not make another host."""
    target = parse_media_url("HTTPS://Example.COM./a?b")

    assert (target.scheme, target.host, target.port) == ("https", "example.com", 443)


def test_one_inner_address_refuses_the_name() -> None:
    """A name that resolves to a public and a private address is refused: either may be picked later."""
    target = parse_media_url("http://example.com/")

    with pytest.raises(MediaUnavailable):
        check_addresses(ANY, target, ["8.8.8.8", "10.0.0.1"])
    with pytest.raises(MediaUnavailable):
        check_addresses(ANY, target, [])
    check_addresses(ANY, target, ["8.8.8.8"])


def test_list_of_hosts_is_the_whole_truth() -> None:
    """With a list, hosts on it may be private, and no other host may be fetched."""
    listed = parse_media_url("http://images.EXAMPLE.com:8080/x")
    check_host(LISTED, listed)
    check_addresses(LISTED, listed, ["10.0.0.1"])
    check_host(LISTED, parse_media_url("http://10.0.0.7/"))

    for other in ("http://example.com/", "http://x.images.example.com/", "http://images.example.com.evil/"):
        with pytest.raises(MediaUnavailable):
            check_host(LISTED, parse_media_url(other))


def test_every_refusal_reads_the_same() -> None:
    """An answer does not tell which inner hosts exist."""
    texts = set()
    for rules, url, addresses in (
        (ANY, "http://a.internal/", ["10.0.0.1"]),
        (ANY, "http://b.internal/", []),
        (LISTED, "http://c.internal/", ["8.8.8.8"]),
    ):
        target = parse_media_url(url)
        with pytest.raises(MediaUnavailable) as refusal:
            check_host(rules, target)
            check_addresses(rules, target, addresses)
        texts.add(refusal.value.message)

    assert len(texts) == 1
