"""Small videos for tests, made with OpenCV's own writers.

Rules of this file: frame `n` of a clip is a flat colour that tells `n`, with a darker corner that tells up
and left; nothing is read back here.
"""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy

CODECS = {"mp4": "mp4v", "avi": "MJPG", "mkv": "mp4v"}


def frame(number: int, width: int, height: int) -> numpy.ndarray[Any, Any]:
    """Return frame `number` as BGR."""
    picture = numpy.full((height, width, 3), (40, 7 * number % 200 + 30, 220 - 5 * number % 200), numpy.uint8)
    picture[: height // 3, : width // 4] = (10, 20, 30)
    return picture


def clip(
    frames: int = 16,
    *,
    fps: float = 8.0,
    width: int = 112,
    height: int = 84,
    form: str = "mp4",
    first: int = 0,
) -> bytes:
    """Return a video of `frames` frames; `first` is the number of its first one, so that two clips differ."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"clip.{form}"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*CODECS[form]), fps, (width, height))
        assert writer.isOpened()
        for number in range(first, first + frames):
            writer.write(frame(number, width, height))
        writer.release()
        return path.read_bytes()


def index_first(data: bytes) -> bytes:
    """Return an MP4 of `clip` with its index before its frames, as it is stored for streaming."""
    boxes: dict[bytes, bytes] = {}
    place = 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        boxes[data[place + 4 : place + 8]] = data[place : place + length]
        place += length
    index = bytearray(boxes[b"moov"])
    table = index.index(b"stco") + 8
    for entry in range(int.from_bytes(index[table : table + 4], "big")):
        where = table + 4 + 4 * entry
        offset = int.from_bytes(index[where : where + 4], "big") + len(index)
        index[where : where + 4] = offset.to_bytes(4, "big")
    return boxes[b"ftyp"] + bytes(index) + boxes.get(b"free", b"") + boxes[b"mdat"]


def video_part(data: bytes, name: str | None = None) -> dict[str, Any]:
    """Return the content part of a video, named `name`."""
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}} | ({"uuid": name} if name else {})
