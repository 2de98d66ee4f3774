"""Which addresses media may be fetched from: a decision on URLs and on resolved addresses.

    rules = FetchRules(allowed_hosts=("images.example.com",))
    target = parse_media_url(url)           # InvalidRequest / UnsupportedMedia
    check_host(rules, target)               # before a name is looked up
    check_addresses(rules, target, addresses)   # after, and for every redirect again

Without `allowed_hosts` any host may be fetched, provided that every address its name resolves to is a public
one. With them only those hosts, which may then be private too.

Rules of this file: no I/O. All refusals read the same, so that an answer tells nothing about what exists
inside the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from epdctl.errors import InvalidRequest, MediaUnavailable, UnsupportedMedia
from epdctl.hosts import ascii_form, is_host

_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f\\]")
_NAT64 = IPv6Network("64:ff9b::/96")
REFUSAL = "the media URL may not be fetched by this worker (see --allowed-media-domains)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRules:
    """`allowed_hosts` are host names or addresses, compared whole and without case; empty: public ones."""

    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTarget:
    """An http(s) URL taken apart; `host` is lower case, without brackets and without a final dot."""

    url: str
    scheme: str
    host: str
    port: int


def parse_media_url(url: str) -> MediaTarget:
    """Return `url` taken apart.

    Raises:
        UnsupportedMedia: another scheme than http or https.
        InvalidRequest: no host, user info, control characters or spaces, or a port that is none.
    """
    if _UNPRINTABLE.search(url):
        raise InvalidRequest("a media URL must not contain spaces, backslashes or control characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequest("the media URL is malformed") from error
    if parts.scheme not in ("http", "https"):
        raise UnsupportedMedia("media URLs must be data:, http:, https: or file:")
    if not host or parts.username is not None or parts.password is not None:
        raise InvalidRequest("a media URL needs a host and must not carry user info")
    if not is_host(ascii_form(host)):
        raise InvalidRequest("the host of a media URL is no name and no IP address")
    default = 443 if parts.scheme == "https" else 80
    return MediaTarget(url=url, scheme=parts.scheme, host=host.rstrip("."), port=port or default)


def is_public(address: str) -> bool:
    """Return whether `address` (text of an IPv4 or IPv6 address) belongs to the public internet.

    Addresses that carry an IPv4 one inside (mapped, 6to4, Teredo, NAT64) are judged by that one too.
    """
    try:
        parsed = ip_address(address.split("%", 1)[0])
    except ValueError:
        return False
    return all(one.is_global and not one.is_multicast for one in _with_inner(parsed))


def _with_inner(parsed: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    if isinstance(parsed, IPv4Address):
        return [parsed]
    if parsed.ipv4_mapped is not None:
        return [parsed.ipv4_mapped]
    if parsed in _NAT64:
        return [IPv4Address(int(parsed) & 0xFFFFFFFF)]
    if parsed.sixtofour is not None:
        return [parsed, parsed.sixtofour]
    if parsed.teredo is not None:
        return [parsed, *parsed.teredo]
    return [parsed]


def _is_allowed_host(rules: FetchRules, target: MediaTarget) -> bool:
    return target.host in {host.lower().rstrip(".") for host in rules.allowed_hosts}


def check_host(rules: FetchRules, target: MediaTarget) -> None:
    """Raise MediaUnavailable when the host is not on the list, where there is a list."""
    if rules.allowed_hosts and not _is_allowed_host(rules, target):
        raise MediaUnavailable(REFUSAL)


def check_addresses(rules: FetchRules, target: MediaTarget, addresses: Iterable[str]) -> None:
    """Raise MediaUnavailable unless the host is on the list or every one of its addresses is public."""
    if _is_allowed_host(rules, target):
        return
    found = list(addresses)
    if not found or not all(is_public(address) for address in found):
        raise MediaUnavailable(REFUSAL)
