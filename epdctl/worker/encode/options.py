"""Processor and media options of a request: which ones are served, and within which bounds.

    options = parse_options(body)               # of pictures
    options = parse_video_options(body)
    options.canonical                           # what goes into the cache key

`mm_processor_kwargs` may hold `min_pixels`, `max_pixels` and `size` with `shortest_edge` and `longest_edge`
(all pixel counts after resizing, as transformers' Qwen processors understand them), at the top (pictures and
videos), under `images_kwargs` or under `videos_kwargs`. `media_io_kwargs` may hold `image` with `image_mode`
"RGB" and `rgba_background_color`, and `video` with `num_frames`, `fps`, `min_frames`, `max_frames` and the
way of sampling, `video_backend`. Options that name another modality do nothing to an item and are passed
over. Anything else is refused by name: an option that is silently ignored would give another embedding than
the consumer expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from epdctl.domain import Modality
from epdctl.errors import InvalidRequest
from epdctl.worker.encode.frames import Sampling

_SCOPES = {Modality.IMAGE: "images_kwargs", Modality.VIDEO: "videos_kwargs", Modality.AUDIO: "audio_kwargs"}
_NO_SAMPLING = "do_sample_frames"
"""An option of videos only; frames are chosen by `media_io_kwargs.video`, so it may only say false."""
_MEDIA = frozenset(modality.value for modality in Modality)
_COUNTS = frozenset({"num_frames", "min_frames", "max_frames"})
_MAX_COUNT = 2**20
_MAX_PIXELS = 2**31
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOptions:
    """Options of one request's pictures; None leaves a bound to the checkpoint's processor."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    background: tuple[int, int, int] = WHITE

    @property
    def canonical(self) -> dict[str, Any]:
        """The options that differ from the defaults, as plain JSON values."""
        values = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        facts: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        return facts if self.background == WHITE else facts | {"background": list(self.background)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    """Options of one request's videos; None leaves a value to the checkpoint or to the way of sampling."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    sampling: Sampling | None = None
    num_frames: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None

    @property
    def canonical(self) -> dict[str, Any]:
        """The options that were given, as plain JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareLimits:
    """Bounds of one item: pixels of a picture or frame, rows; of a video also frames, all pixels, seconds."""

    max_pixels: int
    max_rows: int
    max_video_frames: int
    max_video_pixels: int
    video_timeout_s: float


def parse_options(body: Mapping[str, Any]) -> ItemOptions:
    """Return the options of pictures in a body; raise InvalidRequest naming the one that is not served."""
    low, high = _bounds(body, Modality.IMAGE)
    return ItemOptions(min_pixels=low, max_pixels=high, background=_background(_media(body, Modality.IMAGE)))


def parse_video_options(body: Mapping[str, Any]) -> VideoOptions:
    """Return the options of videos in a body; raise InvalidRequest naming the one that is not served."""
    low, high = _bounds(body, Modality.VIDEO)
    given: dict[str, Any] = {}
    for name, value in _media(body, Modality.VIDEO).items():
        param = f"media_io_kwargs.video.{name}"
        if name in _COUNTS:
            given[name] = _count(value, param)
        elif name == "fps":
            given[name] = _rate(value, param)
        elif name == "video_backend":
            given["sampling"] = _sampling(value, param)
        elif (name, value) not in (("backend", "opencv"), ("frame_recovery", False)):
            served = "num_frames, fps, min_frames, max_frames, video_backend"
            raise InvalidRequest(f"option '{name}' is not served (served: {served})", param=param)
    fewest, most = given.get("min_frames"), given.get("max_frames")
    if fewest is not None and most is not None and fewest > most:
        raise InvalidRequest("min_frames is larger than max_frames", param="media_io_kwargs.video")
    return VideoOptions(min_pixels=low, max_pixels=high, **given)


def _bounds(body: Mapping[str, Any], modality: Modality) -> tuple[int | None, int | None]:
    edges = _edges(_mapping(body.get("mm_processor_kwargs"), "mm_processor_kwargs"), modality)
    low, high = edges.get("shortest_edge"), edges.get("longest_edge")
    if low is not None and high is not None and low > high:
        raise InvalidRequest("min_pixels is larger than max_pixels", param="mm_processor_kwargs")
    return low, high


def _media(body: Mapping[str, Any], modality: Modality) -> Mapping[str, Any]:
    media = _mapping(body.get("media_io_kwargs"), "media_io_kwargs")
    for name in media:
        if name not in _MEDIA:
            text = f"'{name}' is not served (served: image, video)"
            raise InvalidRequest(text, param=f"media_io_kwargs.{name}")
    return _mapping(media.get(modality.value), f"media_io_kwargs.{modality}")


def _count(value: Any, param: str) -> int | None:
    """Return a number of frames; -1 stands for no bound, which num_frames 0 means to the sampling."""
    may_be_all = param.endswith("num_frames")
    if value == -1 and may_be_all:
        return 0
    if type(value) is not int or not 1 <= value <= _MAX_COUNT:
        text = f"must be a whole number of frames from 1 to {_MAX_COUNT}"
        raise InvalidRequest(f"{text}, or -1 for all" if may_be_all else text, param=param)
    return value


def _rate(value: Any, param: str) -> float | None:
    if value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_COUNT:
        text = f"must be a number of frames a second, above 0 and at most {_MAX_COUNT}, or -1 as if not given"
        raise InvalidRequest(text, param=param)
    return float(value)


def _sampling(value: Any, param: str) -> Sampling:
    try:
        return Sampling(value)
    except ValueError as error:
        raise InvalidRequest(f"must be one of {', '.join(Sampling)}", param=param) from error


def _mapping(value: Any, param: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return value


def _edges(processor: Mapping[str, Any], modality: Modality) -> dict[str, int]:
    edges: dict[str, int] = {}
    for name, value in processor.items():
        param = f"mm_processor_kwargs.{name}"
        if name in _EDGES:
            edges[_EDGES[name]] = _pixels(value, param)
        elif name == "size":
            edges |= _size(_mapping(value, param))
        elif name == _SCOPES[modality]:
            edges |= _edges(_mapping(value, param), modality)
        elif name == _NO_SAMPLING and (modality is Modality.IMAGE or value is False):
            continue
        elif name not in _SCOPES.values():
            served = f"min_pixels, max_pixels, size, {_SCOPES[modality]}"
            raise InvalidRequest(f"option '{name}' is not served (served: {served})", param=param)
    return edges


def _size(size: Mapping[str, Any]) -> dict[str, int]:
    for name in size:
        if name not in _EDGES.values():
            param = f"mm_processor_kwargs.size.{name}"
            raise InvalidRequest(f"'{name}' is not served (served: shortest_edge, longest_edge)", param=param)
    return {name: _pixels(value, f"mm_processor_kwargs.size.{name}") for name, value in size.items()}


def _pixels(value: Any, param: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_PIXELS:
        raise InvalidRequest(f"must be a whole number of pixels from 1 to {_MAX_PIXELS}", param=param)
    return value


def _background(image: Mapping[str, Any]) -> tuple[int, int, int]:
    for name, value in image.items():
        param = f"media_io_kwargs.image.{name}"
        if name not in ("image_mode", "rgba_background_color"):
            served = "image_mode, rgba_background_color"
            raise InvalidRequest(f"option '{name}' is not served (served: {served})", param=param)
        if name == "image_mode" and value != "RGB":
            raise InvalidRequest("only image_mode RGB is served", param=param)
    return _colour(image.get("rgba_background_color", list(WHITE)))


def _colour(value: Any) -> tuple[int, int, int]:
    is_colour = (
        isinstance(value, list)
        and len(value) == 3
        and all(type(part) is int and 0 <= part <= 255 for part in value)
    )
    if not is_colour:
        param = "media_io_kwargs.image.rgba_background_color"
        raise InvalidRequest("must be three integers from 0 to 255", param=param)
    return (value[0], value[1], value[2])
