"""Claims about EC control messages beyond the captured ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epdctl.ec import protocol
from epdctl.ec.protocol import BadMessage, Refusal

pytestmark = pytest.mark.unit

RESERVE: dict[str, Any] = {
    "op": "reserve",
    "transfer_id": "t",
    "mm_hash": "h",
    "nbytes": 4,
    "shape": [1, 1],
    "dtype": "float32",
}


def changed(**fields: Any) -> bytes:
    """Return a reserve with some fields replaced, or left out when None."""
    message = {key: value for key, value in (RESERVE | fields).items() if value is not None}
    return json.dumps(message).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"reserve"',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"op": null}',
        b'{"op": ["reserve"]}',
        b"{}",
        *(changed(nbytes=nbytes) for nbytes in (0, -1, 2**63, 2**70, "10", 1.5, 4.0, True)),
        *(
            changed(shape=shape)
            for shape in ([], [0, 1], [-4, -32], [1.5], [True], "11", 4, [1] * 9, [2**50], None)
        ),
        *(changed(transfer_id=text) for text in ("", 5, "x" * 1025, None)),
        *(changed(mm_hash=text) for text in ("", [], None)),
        changed(dtype=None),
        changed(dtype=7),
        b'{"op":"cancel","transfer_id":"t"}',
        b'{"op":"cancel","transfer_id":"t","reservation_id":"","abandon":1}',
        b'{"op":"complete_batch","items":{}}',
        b'{"op":"reserve_batch"}',
        b'{"op":"status"}',
    ],
)
def test_whatever_is_not_in_the_protocol_is_named(body: bytes) -> None:
    """Wrong JSON, types, ranges and missing fields are one error with a reason, never another one."""
    with pytest.raises(BadMessage, match=r"\w"):
        protocol.parse_request(body)


def test_unknown_ops_are_told_which_there_are() -> None:
    """The refusal of an unknown op lists the known ones."""
    with pytest.raises(BadMessage, match="reserve_batch"):
        protocol.parse_request(b'{"op":"frobnicate"}')


def test_unknown_fields_are_ignored() -> None:
    """A newer peer's extra fields do no harm."""
    request = protocol.parse_request(changed(color="blue"))

    assert isinstance(request, protocol.Reserve)


def test_our_extras_are_absent_unless_used() -> None:
    """A message without our extras is exactly vLLM's."""
    item = protocol.CompleteItem(transfer_id="t", reservation_id="r")
    cancel = protocol.Cancel(transfer_id="t", reservation_id="r", abandon=True)

    assert json.loads(protocol.encode(item)) == {"transfer_id": "t", "reservation_id": "r"}
    assert json.loads(protocol.encode(cancel)) == {
        "op": "cancel",
        "transfer_id": "t",
        "reservation_id": "r",
        "abandon": True,
    }


def test_addresses_above_four_gigabytes_survive() -> None:
    """A virtual address is a 64-bit number."""
    body = json.dumps(
        {
            "ok": True,
            "result": {
                "reservation_id": "r",
                "dst_session": "s:1",
                "dst_ptr": 2**64 - 256,
                "nbytes": 1,
                "write": True,
                "ready": False,
            },
        }
    ).encode()

    assert protocol.parse_reply(body, protocol.Reservation).dst_ptr == 2**64 - 256


def test_a_refusal_is_known_by_ok_alone() -> None:
    """The text of a refusal is free; our own consumers add a code."""
    assert Refusal("x") == protocol.parse_reply(b'{"ok":false,"error":"x"}', protocol.Reservation)
    assert protocol.parse_reply(b'{"ok":false,"error":"?","code":"full"}', protocol.Reservation).is_full


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ok":1}', b'{"ok":true}', b'{"ok":true,"result":[]}'])
def test_an_answer_that_is_none_is_named(body: bytes) -> None:
    """An answer outside the protocol is an error, not a reservation."""
    with pytest.raises(BadMessage):
        protocol.parse_reply(body, protocol.Reservation)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:14579", "127.0.0.1", 14579),
        ("tcp://pd-0.pd:1", "pd-0.pd", 1),
        ("tcp://[::1]:65535", "::1", 65535),
        ("tcp://[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_addresses_are_read_and_written_back(text: str, host: str, port: int) -> None:
    """An address is a host and a port, and says so again."""
    address = protocol.parse_address(text)

    assert (host, port, text) == (address.host, address.port, str(address))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:1",
        "http://127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://:1",
        "tcp://a:1/x",
        "tcp://a b:1",
        "tcp://user@a:1",
        "ipc:///tmp/x",
        "tcp://::1:5",
        "tcp://a:1\n",
        "tcp://a..b:1",
        "tcp://..:1",
        "tcp://*:1",
        f"tcp://{'a' * 64}:1",
        f"tcp://{'.'.join(['a' * 60] * 5)}:1",
        "tcp://bücher:1",
        "tcp://a/b:1",
        "tcp://[:::]:1",
        "tcp://[a]:1",
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    """Nothing but tcp, a host and a port."""
    with pytest.raises(BadMessage, match="tcp://host:port"):
        protocol.parse_address(text)
