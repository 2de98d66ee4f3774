"""What an instance URL and an EC control address may look like, and their one normal form.

Rules of this file: pure text; nothing is resolved or contacted. A URL is an instance's identity, so every
verb passes it through `normalise_url` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from epdctl.domain import InstanceSpec, InstanceUrl
from epdctl.ec.protocol import BadMessage, parse_address
from epdctl.errors import SchemaViolation
from epdctl.hosts import is_host, is_wildcard

MAX_URL_CHARS = 2048
MAX_DP_SIZE = 1024

_DEFAULT_PORTS = {"http": 80, "https": 443}


def normalise_url(text: str) -> InstanceUrl:
    """Return the instance URL of `text` in its normal form: lower-case scheme and host, no default port, no
    trailing slash. Raise SchemaViolation when it is no plain http(s) base URL.
    """
    parts = _split(text)
    scheme = parts.scheme
    if scheme not in _DEFAULT_PORTS:
        raise _bad_url("the scheme must be http or https")
    host, port = _host(parts), _port(parts)
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise _bad_url("user info is not allowed")
    if parts.query or parts.fragment or text.strip().endswith(("?", "#")):
        raise _bad_url("a query or fragment is not allowed")
    authority = f"[{host}]" if ":" in host else host
    if port is not None and port != _DEFAULT_PORTS[scheme]:
        authority += f":{port}"
    return InstanceUrl(f"{scheme}://{authority}{_path(parts.path)}")


def _split(text: str) -> SplitResult:
    text = text.strip()
    if not text or len(text) > MAX_URL_CHARS:
        raise _bad_url(f"it must have 1 to {MAX_URL_CHARS} characters")
    if any(ord(char) <= 32 or ord(char) == 127 or char in '\\"<>^`{|}' for char in text):
        raise _bad_url("spaces, control characters and backslashes are not allowed")
    try:
        return urlsplit(text)
    except ValueError:
        raise _bad_url("it cannot be parsed") from None


def _host(parts: SplitResult) -> str:
    host = (parts.hostname or "").lower()
    if not host:
        raise _bad_url("it needs a host, for example http://10.0.0.5:8001")
    if not is_host(host) or host.endswith("."):
        # A name with a final dot is the one without it: an instance has one identity.
        raise _bad_url("its host is no name (labels of 1 to 63 letters, digits, - and _) and no IP address")
    return host


def _port(parts: SplitResult) -> int | None:
    try:
        port = parts.port
    except ValueError:
        raise _bad_url("the port must be a number up to 65535") from None
    if port == 0 or parts.netloc.endswith(":"):
        raise _bad_url("the port must be a number from 1 to 65535")
    return port


def _path(path: str) -> str:
    if any(segment in (".", "..") for segment in path.split("/")):
        raise _bad_url("dot segments are not allowed in its path")
    return path.rstrip("/")


def _bad_url(why: str) -> SchemaViolation:
    return SchemaViolation(f"url is not an instance URL: {why}", param="url")


def complaint(spec: InstanceSpec) -> str | None:
    """Return why an instance with these addresses would not be registered, or None."""
    try:
        if normalise_url(spec.url) != spec.url:
            return "its URL is not in its normal form"
        check_consumer_addresses(spec.ec_zmq_addrs, spec.dp_size)
    except SchemaViolation as error:
        return error.message
    return None


def check_consumer_addresses(addresses: Sequence[str], dp_size: int) -> None:
    """Raise SchemaViolation unless there is no address, or a good and different one for each replica."""
    if addresses and len(addresses) != dp_size:
        raise _bad_addresses(
            f"provide one EC control address per data-parallel replica: dp_size is {dp_size}, "
            f"got {len(addresses)}"
        )
    for address in addresses:
        _check_consumer_address(address)
    if len(set(addresses)) != len(addresses):
        raise _bad_addresses("two replicas cannot share an EC control address")


def _check_consumer_address(address: str) -> None:
    try:
        host = "*" if address.startswith("tcp://*:") else parse_address(address).host
    except BadMessage as error:
        raise _bad_addresses(str(error)) from None
    if is_wildcard(host):
        raise _bad_addresses("an EC control address must name a host that encoders can reach, not a wildcard")


def _bad_addresses(why: str) -> SchemaViolation:
    return SchemaViolation(f"ec_zmq_addrs: {why}", param="ec_zmq_addrs")
