"""Which frames of a video are encoded, and what is told of their times.

The three ways to choose frames, and which model has which, are vLLM's (0.32.0 and 0.33.0,
`multimodal/video.py`): the consumer's prompt is laid out for exactly these frames. `uniform` is the one that
`num_frames` belongs to; those of the Qwen models follow `fps` and pass over `num_frames`.

Rules of this file: numbers in, numbers out. No video is touched here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy

MAX_FPS = 30.0
MAX_FRAMES = 768
MIN_FRAMES = 4
DEFAULT_FPS = 2.0
_DEPTH = 2
"""Frames that the Qwen2 models take at once."""
DEFAULT_NUM_FRAMES = 32
ASSUMED_FPS = 24.0
"""Of a source that does not say, as transformers' Qwen3-VL video processor assumes."""


class Sampling(StrEnum):
    """How frames are chosen; the names are those of vLLM's `media_io_kwargs.video.video_backend`."""

    UNIFORM = "opencv"
    QWEN2 = "qwen2_vl"
    QWEN3 = "qwen3_vl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a video's header says: frames in all, frames a second (0: unknown), size in pixels."""

    frames: int
    fps: float
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameChoice:
    """What a request asks for; None leaves a value to the way of sampling."""

    sampling: Sampling
    num_frames: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None


class NoFrames(ValueError):
    """No frames can be chosen from this source; the text says why."""


def choose_frames(source: Source, choice: FrameChoice) -> list[int]:
    """Return the numbers of the frames to decode, ascending; raises NoFrames."""
    if source.frames < 1:
        raise NoFrames("the video has no frames")
    match choice.sampling:
        case Sampling.UNIFORM:
            return _uniform(source, choice)
        case Sampling.QWEN2:
            return _qwen2(source, choice)
        case Sampling.QWEN3:
            return _qwen3(source, choice)


def _uniform(source: Source, choice: FrameChoice) -> list[int]:
    wanted = DEFAULT_NUM_FRAMES if choice.num_frames is None else choice.num_frames
    count = source.frames if wanted < 1 else min(wanted, source.frames)
    if choice.fps is not None:
        seconds = source.frames / source.fps if source.fps > 0 else 0.0
        count = min(count, math.floor(seconds * choice.fps))
    count = max(1, count)
    if count == source.frames:
        return list(range(count))
    return [int(place) for place in numpy.linspace(0, source.frames - 1, count, dtype=int)]


def _bounds(choice: FrameChoice) -> tuple[float, int, int]:
    fps = min(DEFAULT_FPS if choice.fps is None else choice.fps, MAX_FPS)
    low = MIN_FRAMES if choice.min_frames is None else choice.min_frames
    high = MAX_FRAMES if choice.max_frames is None else min(choice.max_frames, MAX_FRAMES)
    return fps, low, high


def _qwen2(source: Source, choice: FrameChoice) -> list[int]:
    """Return an even number of frames, a step of equal length apart."""
    if source.fps <= 0:
        raise NoFrames("the video does not say how many frames a second it has")
    fps, low, high = _bounds(choice)
    high = min(high, source.frames) // 2 * 2
    count = math.floor(min(max(source.frames / source.fps * fps, low), high, source.frames) / 2) * 2
    if count < 1:
        raise NoFrames(_why_no_two(source, high))
    step = source.frames / count
    # In float32 like transformers', where a place may be rounded up to the next frame, even past the last.
    places = (numpy.arange(math.ceil(source.frames / step)) * step).astype(numpy.float32).astype(int)
    return [min(int(place), source.frames - 1) for place in places]


def _why_no_two(source: Source, high: int) -> str:
    if source.frames < _DEPTH:
        return "the video has fewer than two frames"
    if high < _DEPTH:
        return (
            "media_io_kwargs.video.max_frames must be at least 2 for this model, which takes frames in pairs"
        )
    return "media_io_kwargs.video (fps, min_frames) takes fewer than two frames of this video"


def _qwen3(source: Source, choice: FrameChoice) -> list[int]:
    fps, low, high = _bounds(choice)
    count = int(source.frames / (source.fps if source.fps > 0 else ASSUMED_FPS) * fps)
    count = min(max(count, low), high, source.frames)
    if count < 1:
        raise NoFrames("media_io_kwargs.video.max_frames leaves no frame of the video")
    return [int(place) for place in numpy.linspace(0, source.frames - 1, count).round()]


def timestamps(indices: Sequence[int], fps: float, temporal: int) -> list[float]:
    """Return the seconds of each group of `temporal` frames: the middle of its first and last frame.

    The last frame is repeated until the group is full, as its pixels are.
    """
    rate = fps if fps > 0 else ASSUMED_FPS
    padded = [*indices, *[indices[-1]] * (-len(indices) % temporal)]
    seconds = [place / rate for place in padded]
    return [
        (seconds[first] + seconds[first + temporal - 1]) / 2 for first in range(0, len(seconds), temporal)
    ]
