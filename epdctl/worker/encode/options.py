"""Processor and media options of a request: which ones are served, and within which bounds.

    options = parse_options(body)
    options.canonical            # what goes into the cache key

`mm_processor_kwargs` may hold `min_pixels`, `max_pixels` and `size` with `shortest_edge` and `longest_edge`
(all pixel counts of the resized picture, as transformers' Qwen image processors understand them), at the
top or under `images_kwargs`. `media_io_kwargs` may hold `image` with `image_mode` "RGB" and
`rgba_background_color`. Options that name another modality do nothing to a picture and are passed over.
Anything else is refused by name: an option that is silently ignored would give another embedding than the
consumer expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epdctl.errors import InvalidRequest

_OTHER_KWARGS = frozenset({"videos_kwargs", "audio_kwargs"})
_OTHER_MEDIA = frozenset({"video", "audio"})
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOptions:
    """Options of one request's items; None leaves a bound to the checkpoint's processor."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    background: tuple[int, int, int] = WHITE

    @property
    def canonical(self) -> dict[str, Any]:
        """The options that differ from the defaults, as plain JSON values."""
        values = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        facts: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        return facts if self.background == WHITE else facts | {"background": list(self.background)}


def parse_options(body: Mapping[str, Any]) -> ItemOptions:
    """Return the options in a request body; raise InvalidRequest naming the one that is not served."""
    processor = _mapping(body.get("mm_processor_kwargs"), "mm_processor_kwargs")
    media = _mapping(body.get("media_io_kwargs"), "media_io_kwargs")
    edges = _edges(processor)
    low, high = edges.get("shortest_edge"), edges.get("longest_edge")
    if low is not None and high is not None and low > high:
        raise InvalidRequest("min_pixels is larger than max_pixels", param="mm_processor_kwargs")
    return ItemOptions(min_pixels=low, max_pixels=high, background=_background(media))


def _mapping(value: Any, param: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return value


def _edges(processor: Mapping[str, Any]) -> dict[str, int]:
    edges: dict[str, int] = {}
    for name, value in processor.items():
        param = f"mm_processor_kwargs.{name}"
        if name in _EDGES:
            edges[_EDGES[name]] = _pixels(value, param)
        elif name == "size":
            edges |= _size(_mapping(value, param))
        elif name == "images_kwargs":
            edges |= _edges(_mapping(value, param))
        elif name not in _OTHER_KWARGS:
            served = "min_pixels, max_pixels, size, images_kwargs"
            raise InvalidRequest(f"option '{name}' is not served (served: {served})", param=param)
    return edges


def _size(size: Mapping[str, Any]) -> dict[str, int]:
    for name in size:
        if name not in _EDGES.values():
            param = f"mm_processor_kwargs.size.{name}"
            raise InvalidRequest(f"'{name}' is not served (served: shortest_edge, longest_edge)", param=param)
    return {name: _pixels(value, f"mm_processor_kwargs.size.{name}") for name, value in size.items()}


def _pixels(value: Any, param: str) -> int:
    if type(value) is not int or not 1 <= value <= 2**31:
        raise InvalidRequest("must be a number of pixels, at least 1", param=param)
    return value


def _background(media: Mapping[str, Any]) -> tuple[int, int, int]:
    for name in media:
        if name != "image" and name not in _OTHER_MEDIA:
            raise InvalidRequest(f"'{name}' is not served (served: image)", param=f"media_io_kwargs.{name}")
    image = _mapping(media.get("image"), "media_io_kwargs.image")
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
