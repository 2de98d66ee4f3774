"""Large pictures that a case wants made on demand.

Rules of this file: pure; one picture's pixels are packed once, its copies differ in a comment.
"""

from __future__ import annotations

import base64
import struct
import zlib

from tests.cases.placeholders import png_part

SIDE = 6000


def gradient_pngs(count: int, side: int = SIDE) -> list[str]:
    """Return data URLs of `count` different RGB PNGs of a gradient in both directions."""
    pixels = _gradient(side)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return [_url(header, pixels, f"copy {number}") for number in range(count)]


def _gradient(side: int) -> bytes:
    """Return the packed rows: the first as it is, the others as differences to the row above."""
    packer = zlib.compressobj(1)
    first = bytes(column * 200 // side for column in range(side) for _ in range(3))
    same, brighter = bytes(3 * side), bytes([1]) * (3 * side)
    packed = [packer.compress(b"\x00" + first)]
    up = b"\x02"
    packed += [packer.compress(up + (same if row % 120 else brighter)) for row in range(1, side)]
    return b"".join([*packed, packer.flush()])


def _url(header: bytes, pixels: bytes, comment: str) -> str:
    text = b"Comment\x00" + comment.encode()
    parts = ((b"IHDR", header), (b"tEXt", text), (b"IDAT", pixels), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(png_part(tag, body) for tag, body in parts)
    return "data:image/png;base64," + base64.b64encode(data).decode()
