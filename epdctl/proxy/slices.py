"""JSON read and written as raw slices: a value that no decision needs is never decoded, so never altered.

Rules of this file: pure; readers raise msgspec's errors, which `content` turns into ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

Fields = dict[str, Raw]
"""A JSON object with raw values, in its order."""

NULL = b"null"

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_VALUE = msgspec.json.Decoder()
_RAW = msgspec.json.Decoder(Raw)
_encode = msgspec.json.Encoder().encode


def read_object(text: Raw | bytes | bytearray) -> Fields:
    """Return the fields of a JSON object; raise msgspec.DecodeError when `text` is something else."""
    return _OBJECT.decode(text)


def read_list(text: Raw | bytes) -> list[Raw]:
    """Return the values of a JSON array; raise msgspec.DecodeError when `text` is something else."""
    return _LIST.decode(text)


def read_value(text: Raw | bytes) -> Any:
    """Return the JSON value of `text`."""
    return _VALUE.decode(text)


def is_json_object(text: bytes) -> bool:
    """Say whether `text` is one whole JSON object."""
    try:
        return first_byte(_RAW.decode(text)) == b"{"
    except (msgspec.DecodeError, RecursionError):
        return False


def first_byte(raw: Raw) -> bytes:
    """Return the byte that tells the type of a raw value, or nothing for an absent one."""
    return bytes(memoryview(raw)[:1])


def is_literal(fields: Mapping[str, Raw], name: str, literal: bytes) -> bool:
    """Say whether field `name` is there and reads exactly `literal`, such as `true` or `null`."""
    raw = fields.get(name)
    return raw is not None and bytes(memoryview(raw)[: len(literal) + 1]) == literal


def has_value(fields: Mapping[str, Raw], name: str) -> bool:
    """Say whether field `name` is there and not null: for control fields null means absent."""
    return name in fields and not is_literal(fields, name, NULL)


def object_or_none(raw: Raw | None) -> Fields | None:
    """Return the fields of a JSON object, or None when `raw` is absent or something else."""
    return _OBJECT.decode(raw) if raw is not None and first_byte(raw) == b"{" else None


def write_object(fields: Mapping[str, Raw | bytes]) -> bytes:
    """Return the JSON object of `fields`, each value byte for byte as it is."""
    return b"{" + b",".join([_encode(name) + b":" + bytes(raw) for name, raw in fields.items()]) + b"}"


def write_list(values: Iterable[Raw | bytes]) -> bytes:
    """Return the JSON array of `values`, each byte for byte as it is."""
    return b"[" + b",".join([bytes(raw) for raw in values]) + b"]"
