"""A video decoder process: OpenCV, the decoder that vLLM uses by default, where a crash costs one video only.

    python -m epdctl.worker.encode.video_child      # talks as `video_pipe` says, ends with its standard input

Rules of this file: the only importer of OpenCV. It decides nothing: which frames, which size and how long it
may take is the front's business, which ends this process when it is too slow.
"""

from __future__ import annotations

import io
import math
import os
import resource
import sys
from typing import Any, BinaryIO

import numpy
from PIL import Image

from epdctl.worker.encode.video_pipe import packed, unpack

# FFmpeg would write lines on stderr for every broken video that a client sends.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
import cv2

Frames = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


class _Broken(Exception):
    """The video cannot be decoded."""


class Pipe:
    """Both ends of the conversation."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source = source
        self._target = target

    def send(self, head: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        """Send one message."""
        self._target.write(packed(head, len(payload)))
        self._target.write(payload)
        self._target.flush()

    def receive(self) -> tuple[dict[str, Any], bytes | bytearray]:
        """Return the next message; raises EOFError when the front is gone."""
        return unpack(self._exactly)

    def _exactly(self, count: int) -> bytes:
        data = self._source.read(count)
        if len(data) < count:
            raise EOFError
        return data


def serve_one(pipe: Pipe, data: bytes | bytearray) -> None:
    """Decode one video as the front says."""
    # OpenCV holds no reference to its stream: it must live for as long as the capture.
    stream = io.BytesIO(data)
    try:
        capture = _opened(stream)
        try:
            pipe.send(_source(capture))
            chosen, _ = pipe.receive()
            if "stop" in chosen:
                return
            frames, found = _read(capture, chosen["chosen"])
        finally:
            capture.release()
        pipe.send({"found": found})
        target, _ = pipe.receive()
        if "stop" in target:
            return
        height, width = target["size"]
        sized = resized(frames[: len(found)], height, width, target["resample"])
        pipe.send({}, sized.data.cast("B"))
    except (_Broken, cv2.error, MemoryError):
        pipe.send({"error": True})


def _opened(stream: Any) -> Any:
    capture = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [])
    if not capture.isOpened():
        raise _Broken
    return capture


def _source(capture: Any) -> dict[str, Any]:
    """Return what the header says, with the count of frames that can be shown where that is smaller."""
    frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    # A trimmed MP4 counts frames that its edit list hides; the position of its end does not.
    if frames > 0 and capture.set(cv2.CAP_PROP_POS_AVI_RATIO, 1.0):
        shown = int(capture.get(cv2.CAP_PROP_POS_FRAMES))
        is_end = not capture.grab()
        capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
        if is_end and 0 < shown < frames - 1:
            frames = shown
    width, height = (int(capture.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
    rate = capture.get(cv2.CAP_PROP_FPS)
    fps = rate if math.isfinite(rate) and rate > 0 else 0.0
    return {"frames": frames, "fps": fps, "width": width, "height": height}


def _read(capture: Any, chosen: list[int]) -> tuple[Frames, list[int]]:
    """Return the frames that could be read, in order; every frame up to the last chosen one is decoded."""
    wanted = set(chosen)
    height, width = (int(capture.get(side)) for side in (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH))
    frames = numpy.empty((len(wanted), height, width, 3), dtype=numpy.uint8)
    found: list[int] = []
    for place in range(max(wanted) + 1):
        if not capture.grab() or place not in wanted:
            continue
        is_read, frame = capture.retrieve()
        if is_read and frame.shape == frames.shape[1:]:
            cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, dst=frames[len(found)])
            found.append(place)
    return frames, found


def resized(frames: Frames, height: int, width: int, resample: int) -> Frames:
    """Return frames of that size, resized with Pillow's filter number `resample` where they differ."""
    if frames.shape[1:3] == (height, width):
        return frames
    sized = numpy.empty((len(frames), height, width, 3), dtype=numpy.uint8)
    for target, frame in zip(sized, frames, strict=True):
        target[:] = numpy.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling(resample)))
    return sized


def main() -> int:
    """Serve videos until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    # Whatever a library prints must not get between our messages.
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    pipe = Pipe(sys.stdin.buffer, target)
    pipe.send({"ready": True})
    try:
        while True:
            _, data = pipe.receive()
            serve_one(pipe, data)
    except (EOFError, BrokenPipeError):
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
