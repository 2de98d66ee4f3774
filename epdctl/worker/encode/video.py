"""Decodes the chosen frames of videos, each in a decoder process: a file that crashes one costs nothing else.

    decoder = VideoDecoder()
    clip = decoder.decode(data, plan, limits)       # blocks: call it on a thread
    decoder.close()

OpenCV with FFmpeg can be made to crash by a broken file; decoder processes are started when they are needed,
used again, and ended when they crash or are too slow.

Rules of this file: only what a container's first bytes say it is gets to a decoder, so that no play list
makes it open other files or addresses; every limit is checked before the work it limits.
"""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy
import structlog

from epdctl.errors import MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.containers import SERVED, is_cut_off, kind_of
from epdctl.worker.encode.frames import NoFrames, Source
from epdctl.worker.encode.video_pipe import packed, unpack
from epdctl.worker.shielded import shielded

START_TIMEOUT_S = 60.0
_FEW_FRAMES = 4
_COMMAND = shielded(sys.executable, "-m", "epdctl.worker.encode.video_child")
_PIPE_BYTES = 1 << 20
_LARGEST_MESSAGE = 1 << 34
_LONGEST_VIDEO = 1 << 20
"""Frames; nine hours at 30 a second. A header that says more is broken."""

Frames = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """Bounds of one video: pixels of a frame, chosen frames, their pixels together, seconds to decode."""

    max_frame_pixels: int
    max_frames: int
    max_pixels: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPlan:
    """`choose` names the frames of a source, ascending; `size_of` the (height, width) that so many get.

    Both may raise what the caller wants to see. `resample` is Pillow's number of a filter.
    """

    choose: Callable[[Source], list[int]]
    size_of: Callable[[Source, int], tuple[int, int]]
    resample: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Decoded, resized frames `[n, height, width, 3]` RGB, their numbers in the video, its frame rate."""

    frames: Frames
    indices: list[int]
    fps: float


class _Ended(Exception):
    """The decoder process is gone."""


class _Late(Exception):
    """The decoder process did not answer in time."""


class _Child:
    """One decoder process, used by one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no argument of a client
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pipesize=_PIPE_BYTES,
        )
        self.deadline = time.monotonic() + START_TIMEOUT_S

    def start(self) -> None:
        """Wait until it is ready; raises _Ended or _Late."""
        self.receive()

    def kill(self) -> None:
        """End the process from another thread; the one that uses it finds out."""
        self._process.kill()

    def send(self, head: dict[str, Any], payload: bytes = b"") -> None:
        """Send one message; raises _Ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(packed(head, len(payload)))
            self._process.stdin.write(payload)
            self._process.stdin.flush()
        except OSError as error:
            raise _Ended from error

    def receive(self) -> tuple[dict[str, Any], bytes | bytearray]:
        """Return the next message; raises _Ended, or _Late at the deadline."""
        try:
            return unpack(self._exactly)
        except (EOFError, msgspec.DecodeError) as error:
            raise _Ended from error

    def _exactly(self, count: int) -> bytearray:
        assert self._process.stdout is not None
        if count > _LARGEST_MESSAGE:
            raise EOFError
        descriptor = self._process.stdout.fileno()
        data = bytearray(count)
        left = memoryview(data)
        while left:
            seconds = self.deadline - time.monotonic()
            if seconds <= 0 or not select.select([descriptor], [], [], seconds)[0]:
                raise _Late
            read = os.readv(descriptor, [left])
            if not read:
                raise EOFError
            left = left[read:]
        return data

    def end(self) -> int:
        """Kill the process and return its exit status."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # what was buffered for a dead process is of no use
        return self._process.wait()


class VideoDecoder:
    """Decoder processes, at most one for each thread that decodes at a time."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._busy: set[_Child] = set()
        self._closed = False
        self._log = structlog.get_logger()

    def close(self) -> None:
        """End all processes; a video that is being decoded fails."""
        self._closed = True
        for child in list(self._busy):
            child.kill()
        while True:
            try:
                self._idle.get_nowait().end()
            except queue.Empty:
                return

    def decode(self, data: bytes, plan: ClipPlan, limits: VideoLimits) -> Clip:
        """Return the frames of the video in `data` that `plan` names.

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
        child = self._child()
        self._busy.add(child)
        try:
            return self._decode(child, data, plan, limits)
        finally:
            self._busy.discard(child)

    def _child(self) -> _Child:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            child = _Child()
        try:
            child.start()
        except (_Ended, _Late) as error:
            self._log.error("video_decoder_did_not_start", status=child.end())
            text = "this worker decodes no videos now: its decoder does not start (opencv-python-headless)"
            raise UnsupportedMedia(text) from error
        return child

    def _decode(self, child: _Child, data: bytes, plan: ClipPlan, limits: VideoLimits) -> Clip:
        child.deadline = time.monotonic() + limits.timeout_s
        is_reusable = False
        try:
            clip = _converse(child, data, plan, limits)
            is_reusable = True
        except _Refused as refused:
            is_reusable = True
            raise refused.reason from refused
        except _Ended as error:
            self._log.warning("video_decoder_ended", status=child.end())
            raise MediaUnavailable("the video is broken: its decoder crashed on it") from error
        except _Late as error:
            text = f"the video was not decoded within {limits.timeout_s:g} s (--video-timeout)"
            raise MediaUnavailable(text) from error
        finally:
            if is_reusable and not self._closed:
                self._idle.put(child)
            else:
                child.end()
        return clip


class _Refused(Exception):
    """The video is refused, and the process has been told, or knows, that it is over."""

    def __init__(self, reason: Exception) -> None:
        super().__init__()
        self.reason = reason


def _converse(child: _Child, data: bytes, plan: ClipPlan, limits: VideoLimits) -> Clip:
    child.send({}, data)
    source = Source(**_answer(child))
    with _stopping(child):
        if source.frames > _LONGEST_VIDEO:
            raise MediaUnavailable("the video is broken: it says that it has millions of frames")
        chosen = plan.choose(source)
        _check(source, chosen, limits)
    child.send({"chosen": chosen})
    found: list[int] = _answer(child)["found"]
    with _stopping(child):
        _check_missing(len(chosen), len(chosen) - len(found))
        height, width = plan.size_of(source, len(found))
    child.send({"size": [height, width], "resample": plan.resample})
    _, payload = child.receive()
    frames = numpy.frombuffer(payload, dtype=numpy.uint8)
    if frames.size != len(found) * height * width * 3:
        raise _Ended
    return Clip(frames=frames.reshape(len(found), height, width, 3), indices=found, fps=source.fps)


def _answer(child: _Child) -> dict[str, Any]:
    head, _ = child.receive()
    if "error" in head:
        text = "the video is broken, truncated, or of a codec that is not served"
        raise _Refused(MediaUnavailable(text))
    return head


class _stopping:  # noqa: N801 - used as a statement
    """Tell the decoder to stop when what is inside refuses the video."""

    def __init__(self, child: _Child) -> None:
        self._child = child

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._child.send({"stop": True})
            reason = MediaUnavailable(str(error)) if isinstance(error, NoFrames) else error
            raise _Refused(reason) from error


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


def _check_missing(chosen: int, missing: int) -> None:
    # A header may count a frame too many, so the last one chosen need not exist.
    if missing > 1 or (missing and chosen < _FEW_FRAMES):
        raise MediaUnavailable(f"the video is broken or truncated: {missing} of {chosen} frames missing")
