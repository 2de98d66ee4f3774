"""Which headers cross the proxy, in both directions.

Rules of this file:
- Pure. Towards instances there is an allow-list, so nothing that steers routing can come from a client.
  Towards clients all pass except those of one connection, and those the proxy sets itself.
- Names are lower case here. A value is never logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

RawHeaders = list[tuple[bytes, bytes]]
"""Headers as they came, names in lower case."""

TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
SESSION_HEADER = "x-session-id"
RANK_HEADER = "X-data-parallel-rank"
ROUTING_HEADERS = (
    "x-data-parallel-rank",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-prefill-url",
    "x-decode-url",
)
"""Headers by which clients of other routers name instances; removed, and counted by these names."""

_OF_ONE_CONNECTION = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_SET_BY_US = frozenset({b"content-length", b"date", b"server", b"x-request-id"})
_NOT_RELAYED = _OF_ONE_CONNECTION | _SET_BY_US
_MAX_RETRY_AFTER_S = 86_400


def forwarded_headers(client: Mapping[str, str], authorization: str | None) -> list[tuple[str, str]]:
    """Return what every leg of a request carries besides its own headers: traces and authorization."""
    headers = [(name, client[name]) for name in TRACE_HEADERS if name in client]
    if authorization is not None:
        headers.append(("Authorization", authorization))
    return headers


def routing_headers_in(client: Mapping[str, str]) -> list[str]:
    """Return the names of the routing headers that the client sent."""
    return [name for name in ROUTING_HEADERS if name in client]


def header_of(headers: RawHeaders, name: bytes) -> bytes | None:
    """Return the first value of `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def relayed_headers(headers: RawHeaders) -> RawHeaders:
    """Return an instance's headers that go on to the client."""
    kept = [header for header in headers if header[0] not in _NOT_RELAYED]
    if header_of(headers, b"connection") is None:
        return kept
    named = _named_by_connection(headers)
    return [header for header in kept if header[0] not in named]


def _named_by_connection(headers: RawHeaders) -> frozenset[bytes]:
    values = [value for key, value in headers if key == b"connection"]
    return frozenset(name.strip().lower() for value in values for name in value.split(b","))


def parse_retry_after(headers: RawHeaders) -> int | None:
    """Return `Retry-After` in seconds when it is a plain number, else None."""
    value = header_of(headers, b"retry-after")
    if value is None or not value.strip().isdigit():
        return None
    return min(int(value), _MAX_RETRY_AFTER_S)


def parse_keep_alive(headers: RawHeaders) -> float | None:
    """Return the seconds that the server says it keeps an idle connection, or None."""
    value = header_of(headers, b"keep-alive")
    if value is None:
        return None
    for part in value.split(b","):
        name, _, seconds = part.strip().partition(b"=")
        if name.lower() == b"timeout" and seconds.isdigit():
            return float(seconds)
    return None


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return header lines; a value with a control character is left out, it could start another header."""
    lines = [f"{name}: {value}\r\n" for name, value in headers if value.isprintable()]
    return "".join(lines).encode("utf-8", "surrogateescape")
