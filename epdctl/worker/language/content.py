"""Chat messages: what they say, and which images and videos were encoded for them.

Rules of this file: pure. A message leaves as a chat template wants it; an image or a video leaves as its
place in the order, its grid and its uuid. This worker has no vision tower: whatever still holds pixels is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epdctl.domain import Modality
from epdctl.errors import InvalidRequest, UnsupportedMedia
from epdctl.wire import parse_json
from epdctl.worker.language.positions import Grid

_RAW_MEDIA = frozenset({"image_url", "input_image", "image", "video_url", "audio_url", "input_audio"})
_EMBEDS = {"image_embeds": Modality.IMAGE, "video_embeds": Modality.VIDEO}
_LARGEST_SIDE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """An encoded image or video: its patch grid before merging, and what the request calls it."""

    grid: Grid
    uuid: str
    modality: Modality = Modality.IMAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRules:
    """What the model takes: `merge` patches a side are one row; whether it takes videos."""

    merge: int
    videos: bool = False


def parse_messages(value: Any, rules: MediaRules) -> tuple[list[dict[str, Any]], tuple[ImagePart, ...]]:
    """Return the messages for a chat template and the images and videos in prompt order.

    Raises:
        InvalidRequest: a message or part is malformed.
        UnsupportedMedia: media that was not encoded, or is of a kind this worker does not take.
    """
    if value is None:
        raise InvalidRequest("messages is required", param="messages")
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a non-empty list", param="messages")
    images: list[ImagePart] = []
    messages = [_message(message, f"messages[{i}]", rules, images) for i, message in enumerate(value)]
    return messages, tuple(images)


def _message(value: Any, path: str, rules: MediaRules, images: list[ImagePart]) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InvalidRequest(f"{path} must be an object with a role", param=path)
    message = dict(value)
    content = value.get("content")
    if isinstance(content, list):
        message["content"] = [
            _part(part, f"{path}.content[{i}]", rules, images) for i, part in enumerate(content)
        ]
    elif content is None:
        message["content"] = ""
    elif not isinstance(content, str):
        raise InvalidRequest(f"{path}.content must be a string or a list of parts", param=f"{path}.content")
    if value.get("tool_calls") is not None:
        message["tool_calls"] = _tool_calls(value["tool_calls"], f"{path}.tool_calls")
    return message


def _part(part: Any, path: str, rules: MediaRules, images: list[ImagePart]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{path}.text must be a string", param=f"{path}.text")
        return {"type": "text", "text": part["text"]}
    if kind in _EMBEDS and (_EMBEDS[kind] is Modality.IMAGE or rules.videos):
        images.append(_image(part, _EMBEDS[kind], path, rules.merge))
        return {"type": _EMBEDS[kind].value}
    if kind in _RAW_MEDIA:
        raise UnsupportedMedia(
            f"{path}: this worker has no encoder for {kind}; send the request to the proxy (epdctl serve), "
            "which has its media encoded first",
            param=path,
        )
    if kind in _EMBEDS or kind == "audio_embeds":
        taken = " and ".join(name for name in _EMBEDS if rules.videos or name == "image_embeds")
        raise UnsupportedMedia(f"{path}: {kind} is not supported by this model, only {taken}", param=path)
    raise UnsupportedMedia(
        f"{path} must be an object whose type is text, or an image that came through the proxy", param=path
    )


def _image(part: Mapping[str, Any], modality: Modality, path: str, merge: int) -> ImagePart:
    uuid = part.get("uuid")
    if not isinstance(uuid, str) or not 0 < len(uuid) <= 1024:
        raise InvalidRequest(f"{path}.uuid must be a string of 1 to 1024 characters", param=f"{path}.uuid")
    metadata = part.get(f"{modality}_embeds")
    grid = metadata.get(f"{modality}_grid_thw") if isinstance(metadata, dict) else None
    if isinstance(grid, list) and len(grid) == 1:
        grid = grid[0]
    checked = _checked_grid(grid, merge)
    if checked is None:
        name = f"{path}.{modality}_embeds.{modality}_grid_thw"
        raise InvalidRequest(
            f"{name} must be three positive integers, the last two multiples of {merge}; "
            "embeddings themselves are not taken from a request",
            param=name,
        )
    return ImagePart(grid=checked, uuid=uuid, modality=modality)


def _checked_grid(grid: Any, merge: int) -> Grid | None:
    if not isinstance(grid, list) or len(grid) != 3 or not all(map(_is_side, grid)):
        return None
    frames, height, width = grid
    return (frames, height, width) if height % merge == 0 and width % merge == 0 else None


def _is_side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST_SIDE


def _tool_calls(value: Any, path: str) -> Sequence[Mapping[str, Any]]:
    """Return past tool calls with arguments as objects: templates print them, clients send JSON text."""
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise InvalidRequest(f"{path} must be a list of objects", param=path)
    return [_tool_call(call, f"{path}[{i}]") for i, call in enumerate(value)]


def _tool_call(call: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"].encode() or b"{}")
    except InvalidRequest as error:
        name = f"{path}.function.arguments"
        raise InvalidRequest(f"{name} must be JSON", param=name) from error
    return {**call, "function": {**function, "arguments": arguments}}
