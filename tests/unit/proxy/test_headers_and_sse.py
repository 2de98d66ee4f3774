"""Headers that cross the proxy, and how streams end."""

from __future__ import annotations

import json

import pytest
from multidict import CIMultiDict

from epdctl.errors import UpstreamUnreachable
from epdctl.proxy.headers import (
    encode_headers,
    forwarded_headers,
    parse_keep_alive,
    parse_retry_after,
    relayed_headers,
    routing_headers_in,
)
from epdctl.proxy.sse import StreamTail, error_event

pytestmark = pytest.mark.unit


def test_only_listed_headers_go_upstream() -> None:
    """Traces pass; what could steer routing, or belongs to one connection, does not."""
    client = CIMultiDict(
        {
            "TraceParent": "00-a-b-01",
            "X-Forwarded-Host": "evil",
            "X-Prefiller-Host-Port": "evil",
            "Cookie": "secret",
            "Connection": "x",
        }
    )

    assert forwarded_headers(client, "Bearer k") == [
        ("traceparent", "00-a-b-01"),
        ("Authorization", "Bearer k"),
    ]
    assert routing_headers_in(client) == ["x-prefiller-host-port"]


def test_headers_of_one_connection_do_not_reach_the_client() -> None:
    """Neither the known ones, nor those that Connection names, nor what the proxy sets itself."""
    headers = [
        (b"connection", b"close, X-Drop"),
        (b"x-drop", b"1"),
        (b"keep-alive", b"timeout=1"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"3"),
        (b"server", b"uvicorn"),
        (b"x-request-id", b"theirs"),
        (b"x-ok", b"1"),
        (b"content-type", b"application/json"),
    ]

    assert relayed_headers(headers) == [(b"x-ok", b"1"), (b"content-type", b"application/json")]


def test_a_header_cannot_carry_another() -> None:
    """A value with a control character is left out."""
    assert encode_headers([("a", "1\r\nX-Evil: 1"), ("b", "2")]) == b"b: 2\r\n"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"7", 7), (b" 7 ", 7), (b"Fri, 31 Dec 1999", None), (b"-1", None), (b"9" * 9, 86_400)],
)
def test_retry_after(value: bytes, seconds: int | None) -> None:
    """Plain seconds are understood and bounded."""
    assert parse_retry_after([(b"retry-after", value)]) == seconds


def test_keep_alive() -> None:
    """A server may say how long it keeps a connection."""
    assert parse_keep_alive([(b"keep-alive", b"max=5, Timeout=12")]) == 12
    assert parse_keep_alive([(b"keep-alive", b"timeout=x")]) is None
    assert parse_keep_alive([]) is None


@pytest.mark.parametrize(
    ("pieces", "done"),
    [
        ([b"data: {}\n\n", b"data: [DONE]\n\n"], True),
        ([b"data: {}\n\nda", b"ta: [DO", b"NE]\n\n"], True),
        ([b"data:[DONE]\r\n\r\n"], True),
        ([b"data: [DONE]\n\n", b"garbage"], True),
        ([b"data: {}\n\n"], False),
        ([b'data: {"content":"data: [DONE]"}\n\n'], False),
        ([b'data: {"content":"\\ndata: [DONE]\\n"}\n\n'], False),
        ([], False),
    ],
)
def test_a_finished_stream_is_told_from_a_cut_one(pieces: list[bytes], done: bool) -> None:
    """[DONE] counts as its own line, however the bytes were split, and not inside an answer."""
    tail = StreamTail()
    for piece in pieces:
        tail.feed(piece)

    assert tail.is_done is done


@pytest.mark.parametrize(
    ("before", "opening"), [(b"", b""), (b"data: {}\n\n", b""), (b"x\r\n\r\n", b""), (b"data: {", b"\n\n")]
)
def test_an_error_is_an_event_of_its_own(before: bytes, opening: bytes) -> None:
    """The error event never continues an event that was cut off."""
    tail = StreamTail()
    tail.feed(before)
    event = error_event(UpstreamUnreachable("gone"), tail)

    assert event.startswith(opening + b"data: {")
    assert json.loads(event.strip()[5:])["error"]["code"] == "upstream_unreachable"
