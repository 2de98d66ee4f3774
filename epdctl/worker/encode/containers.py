"""What the bytes of a video file say of their container, without a decoder.

    kind_of(data)           # None: no container that is served
    is_cut_off(data)        # the file ends before its own lengths say so

A decoder gives the frames that are left of a truncated file and a smaller count, as if nothing was missing;
the lengths that MP4, MOV, AVI, MKV and WebM files carry tell.

Rules of this file: only the first bytes and lengths are looked at; nothing is trusted to be well formed.
"""

from __future__ import annotations

from enum import StrEnum

SERVED = "MP4, MOV, MKV, WebM, AVI, MPEG, FLV, OGG, GIF"
_MOV_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
_OTHERS = (b"FLV", b"OggS", b"GIF8", b"\x00\x00\x01\xba", b"\x00\x00\x01\xb3")
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_TS_PACKET = 188
_RIFF_UNKNOWN = 2**32 - 16
"""From here on a RIFF length stands for a stream whose end was not known."""


class Container(StrEnum):
    """Families of containers."""

    MOV = "mov"
    MATROSKA = "matroska"
    AVI = "avi"
    OTHER = "other"


def kind_of(data: bytes) -> Container | None:
    """Return the container that `data` starts as, or None."""
    if data[4:8] in _MOV_BOXES:
        return Container.MOV
    if data.startswith(_EBML):
        return Container.MATROSKA
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return Container.AVI
    is_stream = data[:1] == b"G" == data[_TS_PACKET : _TS_PACKET + 1]
    return Container.OTHER if is_stream or data.startswith(_OTHERS) else None


def is_cut_off(data: bytes) -> bool:
    """Return whether `data` says that it is longer than it is."""
    match kind_of(data):
        case Container.MOV:
            return _end_of_boxes(data) > len(data)
        case Container.MATROSKA:
            return _end_of_segment(data) > len(data)
        case Container.AVI:
            length = int.from_bytes(data[4:8], "little")
            return length < _RIFF_UNKNOWN and length + 8 > len(data) + 1
        case _:
            return False


def _end_of_boxes(data: bytes) -> int:
    place = 0
    while place + 8 <= len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        if length == 1:
            length = int.from_bytes(data[place + 8 : place + 16], "big")
        if length < 8:
            return 0  # 0 is "to the end"; anything else is for the decoder to judge
        place += length
    return place


def _end_of_segment(data: bytes) -> int:
    header = _sized(data, len(_EBML))
    if header is None or data[header : header + len(_SEGMENT)] != _SEGMENT:
        return 0
    return _sized(data, header + len(_SEGMENT)) or 0


def _sized(data: bytes, place: int) -> int | None:
    """Return where the element ends whose length stands at `place`; None when its end is not known."""
    first = data[place] if place < len(data) else 0
    width = 9 - first.bit_length()
    if width > 8:
        return None
    mark = 1 << (7 * width)
    value = int.from_bytes(data[place : place + width], "big")
    length = value - mark
    return None if length == mark - 1 else place + width + length
