"""How a worker's front and its video decoder processes talk: a JSON head and a payload, through pipes.

    front -> decoder   {} + the video file, then {"chosen": [...]},
                       then {"size": [height, width], "resample": n};
                       at the two later steps {"stop": true} ends the video
    decoder -> front   {"ready": true} once; per video {"frames", "fps", "width", "height"}, {"found": [...]},
                       {} + the frames; or {"error": true} at any step, which ends the video

Rules of this file: bytes and lengths; the reader is handed in. Nothing is executed that is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

_LENGTHS = struct.Struct(">IQ")


def packed(head: dict[str, Any], payload_nbytes: int = 0) -> bytes:
    """Return what goes before a payload of that many bytes."""
    encoded = msgspec.json.encode(head)
    return _LENGTHS.pack(len(encoded), payload_nbytes) + encoded


def unpack(read: Callable[[int], bytes | bytearray]) -> tuple[dict[str, Any], bytes | bytearray]:
    """Return the next head and payload; `read(n)` gives exactly `n` bytes, or raises EOFError."""
    head_nbytes, payload_nbytes = _LENGTHS.unpack(read(_LENGTHS.size))
    head = msgspec.json.decode(read(head_nbytes), type=dict[str, Any])
    return head, read(payload_nbytes) if payload_nbytes else b""
