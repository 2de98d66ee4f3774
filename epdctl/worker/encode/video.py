"""Decodes the chosen frames of a video with OpenCV, the decoder that vLLM uses by default.

Rules of this file: only what a container's first bytes say it is gets to the decoder, so that no play list
makes it open other files or addresses; every limit is checked before the work it limits; OpenCV's failures
end here. Runs on a thread, never on a loop. Imported only when a video comes: pictures do not pay for it.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from epdctl.errors import MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.containers import SERVED, is_cut_off, kind_of
from epdctl.worker.encode.frames import NoFrames, Source

# FFmpeg would write a line on stderr for every broken video that a client sends.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
import cv2

cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_FEW_FRAMES = 4

Frames = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """Bounds of one video: pixels of a frame, chosen frames, their pixels together, seconds to decode."""

    max_frame_pixels: int
    max_frames: int
    max_pixels: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Decoded frames `[n, height, width, 3]` RGB, their numbers in the video, and its frames a second."""

    frames: Frames
    indices: list[int]
    fps: float


def decode_video(data: bytes, choose: Callable[[Source], list[int]], limits: VideoLimits) -> Clip:
    """Return the frames of the video in `data` that `choose` names.

    Raises:
        UnsupportedMedia: the bytes are in no container that is served, or no decoder takes them.
        MediaUnavailable: empty, broken, truncated, without frames, or over a limit.
    """
    if not data:
        raise MediaUnavailable("the video is empty (0 bytes)")
    if kind_of(data) is None:
        raise UnsupportedMedia(f"the data is no video in a container served ({SERVED})")
    if is_cut_off(data):
        raise MediaUnavailable("the video is truncated: its file says that it is longer")
    deadline = time.monotonic() + limits.timeout_s
    try:
        return _decode(data, choose, limits, deadline)
    except cv2.error as error:
        raise MediaUnavailable("the video is broken or truncated") from error
    except NoFrames as error:
        raise MediaUnavailable(str(error)) from error


def _decode(data: bytes, choose: Callable[[Source], list[int]], limits: VideoLimits, deadline: float) -> Clip:
    budget_ms = max(1, int(limits.timeout_s * 1000))
    options = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, budget_ms, cv2.CAP_PROP_READ_TIMEOUT_MSEC, budget_ms]
    stream: Any = io.BytesIO(data)
    capture = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, options)
    try:
        if not capture.isOpened():
            raise MediaUnavailable("the video is broken, truncated, or of a codec that is not served")
        source = _source(capture)
        chosen = choose(source)
        _check(source, chosen, limits)
        frames, found = _read(capture, source, chosen, deadline, limits.timeout_s)
    finally:
        capture.release()
    missing = len(chosen) - len(found)
    # A header may count a frame too many, so the last one chosen need not exist.
    if missing > 1 or (missing and len(chosen) < _FEW_FRAMES):
        raise MediaUnavailable(f"the video is broken or truncated: {missing} of {len(chosen)} frames missing")
    return Clip(frames=frames[: len(found)], indices=found, fps=source.fps)


def _source(capture: Any) -> Source:
    """Return what the header says, with the count of frames that can be shown where that is smaller."""
    frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    # A trimmed MP4 counts frames that its edit list hides; the position of its end does not.
    if frames > 0 and capture.set(cv2.CAP_PROP_POS_AVI_RATIO, 1.0):
        shown = int(capture.get(cv2.CAP_PROP_POS_FRAMES))
        is_end = not capture.grab()
        capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
        if is_end and 0 < shown < frames - 1:
            frames = shown
    return Source(
        frames=frames,
        fps=capture.get(cv2.CAP_PROP_FPS),
        width=int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)),
        height=int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT)),
    )


def _check(source: Source, chosen: list[int], limits: VideoLimits) -> None:
    pixels = source.width * source.height
    if pixels < 1:
        raise MediaUnavailable("the video is broken: its frames have no size")
    if pixels > limits.max_frame_pixels:
        text = f"the video's frames have more than {limits.max_frame_pixels} pixels"
        raise MediaUnavailable(f"{text} (--max-image-pixels)")
    if len(chosen) > limits.max_frames:
        text = f"{len(chosen)} frames would be taken of the video, more than {limits.max_frames}"
        raise MediaUnavailable(f"{text} (--max-video-frames)")
    if len(chosen) * pixels > limits.max_pixels:
        text = f"the frames taken of the video have more than {limits.max_pixels} pixels together"
        raise MediaUnavailable(f"{text} (--max-video-pixels)")


def _read(
    capture: Any, source: Source, chosen: list[int], deadline: float, timeout_s: float
) -> tuple[Frames, list[int]]:
    """Return the frames that could be read, in order; every frame up to the last chosen one is decoded."""
    wanted = set(chosen)
    frames = numpy.empty((len(wanted), source.height, source.width, 3), dtype=numpy.uint8)
    found: list[int] = []
    for place in range(max(wanted) + 1):
        if time.monotonic() > deadline:
            raise MediaUnavailable(f"the video was not decoded within {timeout_s:g} s (--video-timeout)")
        if not capture.grab() or place not in wanted:
            continue
        is_read, frame = capture.retrieve()
        if is_read and frame.shape == frames.shape[1:]:
            cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, dst=frames[len(found)])
            found.append(place)
    return frames, found
