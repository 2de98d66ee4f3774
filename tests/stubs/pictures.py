"""What a real encoder would say about a picture: its size from the file header, and its patch grid.

Rules of this file: pure; a picture it cannot read has no grid, it is never guessed.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from dataclasses import dataclass

PATCH, MERGE = 14, 2
FACTOR = PATCH * MERGE
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Width and height in pixels."""

    width: int
    height: int


_HEADER_CHARACTERS = 87_380


def data_url_start(url: str) -> bytes | None:
    """Return the first 64 KiB in a base64 `data:` URL, where the size stands; None for any other URL."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        return None
    try:
        return base64.b64decode(payload[:_HEADER_CHARACTERS], validate=True)
    except (binascii.Error, ValueError):
        return None


def picture_size(data: bytes) -> Size | None:
    """Return the size of a PNG, GIF, BMP or JPEG from its header, or None."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return Size(width=width, height=height)
    if data[:4] == b"GIF8" and len(data) >= 10:
        width, height = struct.unpack("<HH", data[6:10])
        return Size(width=width, height=height)
    if data[:2] == b"BM" and len(data) >= 26:
        width, height = struct.unpack("<ii", data[18:26])
        return Size(width=width, height=abs(height))
    if data[:2] == b"\xff\xd8":
        return _jpeg_size(data)
    return None


def _jpeg_size(data: bytes) -> Size | None:
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], struct.unpack(">H", data[at + 2 : at + 4])[0]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return Size(width=width, height=height)
        at += 2 + length
    return None


def image_grid(size: Size, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS) -> list[int]:
    """Return `[t, h, w]` patches as Qwen2-VL's processor resizes: multiples of 28, within a pixel budget."""
    height = max(FACTOR, round(size.height / FACTOR) * FACTOR)
    width = max(FACTOR, round(size.width / FACTOR) * FACTOR)
    area = size.height * size.width
    if height * width > max_pixels:
        shrink = math.sqrt(area / max_pixels)
        height = max(FACTOR, math.floor(size.height / shrink / FACTOR) * FACTOR)
        width = max(FACTOR, math.floor(size.width / shrink / FACTOR) * FACTOR)
    elif height * width < min_pixels:
        grow = math.sqrt(min_pixels / area)
        height = math.ceil(size.height * grow / FACTOR) * FACTOR
        width = math.ceil(size.width * grow / FACTOR) * FACTOR
    return [1, height // PATCH, width // PATCH]
