"""JSON that crosses processes: one decoder and one encoder for all of it.

Rules of this file: foreign bytes become typed values here or an `InvalidRequest`; nothing else parses JSON
with its own settings. Media bodies are not parsed here (see `proxy.content`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from epdctl.errors import InvalidRequest

T = TypeVar("T")

_ENCODER = msgspec.json.Encoder()


def encode_json(value: object) -> bytes:
    """Return `value` as compact UTF-8 JSON."""
    return _ENCODER.encode(value)


def parse_json(data: bytes | bytearray | memoryview) -> Any:
    """Return the JSON value in `data`; raise InvalidRequest when it is not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON") from error


def parse_object(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the JSON object in `data`; raise InvalidRequest when it is anything else."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def parse_as(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Return `data` as a `kind` (a msgspec struct); raise InvalidRequest naming the field that is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON") from error
