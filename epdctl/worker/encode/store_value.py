"""What a value of the shared store looks like: a header that says what the rows are, then the rows.

    8 bytes    "epdec1" and two zeroes
    4 bytes    length of the header's JSON, little-endian
    32 bytes   blake3 of the header's JSON
    JSON       {"key", "nbytes", "facts"}, padded with blanks so that the rows begin at a multiple of 64
    rows       `nbytes` bytes; `facts.digest` is their blake3

A value may be cut short, overwritten or of another release: whatever is not exactly this, for exactly this
key, is no value.

Rules of this file: bytes in, bytes out. Another layout of values or facts gets another `PREFIX`.
"""

from __future__ import annotations

import struct

import msgspec
from blake3 import blake3

from epdctl.worker.encode.cache import Facts

PREFIX = "epdctl/ec/1/"
"""Before a cache key in the store; changes with the layout of values or facts."""

_MAGIC = b"epdec1\0\0"
_ALIGNMENT = 64
_START = struct.Struct("<8sI32s")


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str
    nbytes: int
    facts: Facts


def header_of(key: str, nbytes: int, facts: Facts) -> bytes:
    """Return what comes before the rows."""
    text = msgspec.json.encode(_Header(key=key, nbytes=nbytes, facts=facts))
    length = -(-(_START.size + len(text)) // _ALIGNMENT) * _ALIGNMENT - _START.size
    text = text.ljust(length)
    return _START.pack(_MAGIC, length, blake3(text).digest()) + text


def parse_value(key: str, value: memoryview) -> tuple[Facts, memoryview] | None:
    """Return facts and rows of a value, after checking every byte; None when it is not the value of `key`."""
    if value.nbytes < _START.size:
        return None
    magic, length, digest = _START.unpack_from(value)
    text, rows = value[_START.size : _START.size + length], value[_START.size + length :]
    if magic != _MAGIC or blake3(text).digest() != digest:
        return None
    try:
        header = msgspec.json.decode(text, type=_Header)
    except msgspec.DecodeError:
        return None
    if header.key != key or header.nbytes != rows.nbytes or not rows.nbytes:
        return None
    return (header.facts, rows) if blake3(rows).hexdigest() == header.facts.digest else None
