"""Exchanges as text that is the same for every run: numbered names for what varies, digests for media.

Rules of this file: pure; the same value gets the same name within one scenario, so that a reader can follow
it from hop to hop."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tests.interop.control_tap import ControlExchange
from tests.interop.tap import Exchange, Headers

BASE64 = re.compile(r"[A-Za-z0-9+/]{120,}={0,2}")
NUMBERS = re.compile(r"\[\s+-?[\d.]+(?:,\s+-?[\d.]+)*\s+\]")
VARYING = re.compile(
    r"(?P<request>chatcmpl-[0-9A-Za-z:_-]+)"
    r"|(?P<id>\b(?:[0-9a-f]{64}|[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b)"
    r"(?P<leg>:\d+:[0-9a-f]{6}\b)?"
    r"|(?P<address>\b127\.0\.0\.1:\d+\b)"
)
VARYING_FIELDS = frozenset(
    {
        *("created", "dst_ptr", "ports", "system_fingerprint", "remote_blocks_expiry_time", "remote_port"),
        *("remote_request_id", "remote_engine_id", "traceparent"),
    }
)
LEFT_OUT_HEADERS = frozenset({"date", "content-length", "host", "user-agent", "accept-encoding", "server"})


class Names:
    """Numbered names for values, in the order of their first appearance."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def name_of(self, kind: str, value: str) -> str:
        """Return the name of `value`."""
        if value not in self._names:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[value] = f"<{kind} {self._counts[kind]}>"
        return self._names[value]

    def in_text(self, text: str) -> str:
        """Return `text` with media as digests and varying values as names."""
        if BASE64.search(text):
            return BASE64.sub(lambda m: _digest(m.group()), text)
        return VARYING.sub(self._named, text)

    def _named(self, match: re.Match[str]) -> str:
        if match["id"]:
            # An encode call's request id is its parent's with the item's index and a random end.
            leg = match["leg"]
            return self.name_of("id", match["id"]) + (leg[:-6] + "<random>" if leg else "")
        kind = "request" if match["request"] else "address"
        return self.name_of(kind, match.group())

    def in_json(self, value: Any, field: str = "") -> Any:
        """Return a JSON value with everything in it replaced that varies."""
        if isinstance(value, dict):
            return {self.in_text(key): self.in_json(entry, key) for key, entry in value.items()}
        if field in VARYING_FIELDS and value is not None:
            return f"<{field}>"
        if isinstance(value, list):
            return [self.in_json(entry, field) for entry in value]
        if isinstance(value, float):
            return round(value, 3)
        return self.in_text(value) if isinstance(value, str) else value


def _digest(base64: str) -> str:
    return f"<base64 length={len(base64)} sha256={hashlib.sha256(base64.encode()).hexdigest()[:16]}>"


def _headers(headers: Headers, names: Names) -> dict[str, str]:
    kept = {name.lower(): value for name, value in headers if name.lower() not in LEFT_OUT_HEADERS}
    return {name: names.in_text(kept[name]) for name in sorted(kept)}


def _body(raw: bytes, content_type: str, names: Names) -> Any:
    text = raw.decode("utf-8", "replace")
    if content_type.startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [_parsed(event, names) for event in events]
    return _parsed(text, names)


def _parsed(text: str, names: Names) -> Any:
    try:
        return names.in_json(json.loads(text))
    except ValueError:
        return names.in_text(text)


def as_text(record: dict[str, Any]) -> str:
    """Return a record as a file's content: indented JSON, lists of numbers on one line."""
    text = json.dumps(record, indent=2, ensure_ascii=False)
    return (
        NUMBERS.sub(lambda m: re.sub(r"\s+", " ", m.group()).replace("[ ", "[").replace(" ]", "]"), text)
        + "\n"
    )


def http_record(exchange: Exchange, names: Names) -> dict[str, Any]:
    """Return one HTTP exchange as it is written to a file."""
    response_headers = _headers(exchange.response_headers, names)
    content_type = response_headers.get("content-type", "")
    return {
        "hop": exchange.hop,
        "request": {
            "method": exchange.method,
            "path": exchange.path,
            "headers": _headers(exchange.request_headers, names),
            "body": _body(exchange.request_body, "", names),
        },
        "response": {
            "status": exchange.status,
            "headers": response_headers,
            "body": _body(bytes(exchange.response_body), content_type, names),
        },
    }


def control_record(exchange: ControlExchange, names: Names) -> dict[str, Any]:
    """Return one EC control exchange as it is written to a file."""
    return {
        "hop": "control",
        "request": names.in_json(exchange.request),
        "reply": names.in_json(exchange.reply),
    }
