"""Reads an encode request: an OpenAI chat body whose media parts are the work.

Rules of this file: plain values in, typed values out, or an InvalidRequest / UnsupportedMedia that names the
field. What a vLLM encoder ignores is ignored too (sampling fields, text parts, unknown top-level fields);
what would be encoded wrongly or silently dropped is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from epdctl.domain import Modality
from epdctl.ec.protocol import BadMessage, is_new_transfer_id, parse_address
from epdctl.errors import InvalidRequest, UnknownModel, UnsupportedMedia
from epdctl.worker.encode.keys import NamedTransfer
from epdctl.worker.encode.options import ItemOptions, VideoOptions, parse_options, parse_video_options

_MEDIA_PARTS = {
    "image_url": (Modality.IMAGE, "image_url"),
    "input_image": (Modality.IMAGE, "image_url"),
    "video_url": (Modality.VIDEO, "video_url"),
}
"""By type of part: what it is, and the field that holds its URL."""
_TEXT_PARTS = frozenset({"text", "input_text", "refusal"})
_RESERVED_NAMES = frozenset({"ec_items", "consumer_zmq"})
"""Keys of `ec_transfer_params` that an item must not be called: its entry would overwrite them."""
_MAX_NAME_CHARACTERS = 1024
_OPTIONS: Mapping[Modality, Callable[[Mapping[str, Any]], ItemOptions | VideoOptions]] = {
    Modality.IMAGE: parse_options,
    Modality.VIDEO: parse_video_options,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """One item of the request: where it stands in the body, its URL, and the name its sender gave it."""

    index: int
    param: str
    url: str
    uuid: str | None
    modality: Modality = Modality.IMAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """What one encode request asks for; nothing is pushed without a `consumer_zmq`.

    `options` is what `processor_options` and `media_options`, kept as they came, mean to this worker's
    pictures and videos; a modality that the request has no items of is absent.
    """

    parts: tuple[MediaPart, ...]
    options: Mapping[Modality, ItemOptions | VideoOptions]
    consumer_zmq: str | None
    named: tuple[NamedTransfer, ...]
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    media_options: Mapping[str, Any] = field(default_factory=dict)


def parse_encode_request(body: Mapping[str, Any], *, model: str, max_items: int) -> EncodeRequest:
    """Return the request in `body`.

    Raises:
        UnknownModel: `model` is given and is not the one that is served.
        InvalidRequest: a field has the wrong type, or there are more than `max_items` items.
        UnsupportedMedia: a part that this worker cannot encode.
    """
    _check_model(body.get("model"), model)
    if body.get("stream") is True:
        raise InvalidRequest("the encode stage does not stream: set stream to false", param="stream")
    parts = tuple(_media_parts(body.get("messages")))
    if len(parts) > max_items:
        text = f"at most {max_items} media items may be in one request (--max-items)"
        raise InvalidRequest(text, param="messages")
    consumer_zmq, named = _transfer_params(body.get("ec_transfer_params"))
    return EncodeRequest(
        parts=parts,
        options={modality: _OPTIONS[modality](body) for modality in {part.modality for part in parts}},
        processor_options=body.get("mm_processor_kwargs") or {},
        media_options=body.get("media_io_kwargs") or {},
        consumer_zmq=consumer_zmq,
        named=named,
    )


def _check_model(asked: Any, served: str) -> None:
    if asked is None or asked == served:
        return
    if not isinstance(asked, str):
        raise InvalidRequest("model must be a string", param="model")
    raise UnknownModel(f"this worker serves the model `{served}` only", param="model")


def _media_parts(messages: Any) -> Iterator[MediaPart]:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    index = 0
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise InvalidRequest("a message must be an object", param=where)
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise InvalidRequest("content must be a string or a list of parts", param=f"{where}.content")
        for place, part in enumerate(content):
            media = _media_part(part, index, f"{where}.content[{place}]")
            if media is not None:
                index += 1
                yield media


def _media_part(part: Any, index: int, where: str) -> MediaPart | None:
    if isinstance(part, str):
        return None
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest("a content part must be an object with a type", param=where)
    kind = part["type"]
    if kind in _TEXT_PARTS:
        return None
    if kind not in _MEDIA_PARTS:
        text = f"this worker encodes image_url and video_url parts, not '{kind[:40]}'"
        raise UnsupportedMedia(text, param=where)
    modality, name = _MEDIA_PARTS[kind]
    url, uuid = _url(part, name, where), _uuid(part.get("uuid"), where)
    return MediaPart(index=index, param=where, url=url, uuid=uuid, modality=modality)


def _url(part: Mapping[str, Any], name: str, where: str) -> str:
    value = part.get(name)
    if value is None:
        text = f"an {part['type']} part needs its media, a uuid alone is not enough"
        raise UnsupportedMedia(text, param=where)
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{name}.url must be a non-empty string", param=f"{where}.{name}.url")
    return url


def _uuid(value: Any, where: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME_CHARACTERS or value in _RESERVED_NAMES:
        text = f"uuid must be a string of 1 to {_MAX_NAME_CHARACTERS} characters, and no reserved name"
        raise InvalidRequest(text, param=f"{where}.uuid")
    return value


def _transfer_params(value: Any) -> tuple[str | None, tuple[NamedTransfer, ...]]:
    if value is None:
        return None, ()
    if not isinstance(value, dict):
        raise InvalidRequest("ec_transfer_params must be an object", param="ec_transfer_params")
    return _consumer(value.get("consumer_zmq")), _named(value.get("ec_items"))


def _consumer(value: Any) -> str | None:
    param = "ec_transfer_params.consumer_zmq"
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest("must be a string such as tcp://10.0.0.5:14579", param=param)
    try:
        parse_address(value)
    except BadMessage as error:
        raise InvalidRequest(str(error), param=param) from error
    return value


def _named(value: Any) -> tuple[NamedTransfer, ...]:
    param = "ec_transfer_params.ec_items"
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("must be a list of objects with a transfer_id", param=param)
    named = tuple(_named_one(entry, f"{param}[{number}]") for number, entry in enumerate(value))
    seen: set[str] = set()
    for number, entry in enumerate(named):
        if entry.transfer_id in seen:
            text = "the same transfer_id is given twice: each embedding is delivered under its own"
            raise InvalidRequest(text, param=f"{param}[{number}].transfer_id")
        seen.add(entry.transfer_id)
    return named


def _named_one(entry: Any, param: str) -> NamedTransfer:
    if not isinstance(entry, dict):
        raise InvalidRequest("must be an object with a transfer_id", param=param)
    transfer_id, mm_hash = entry.get("transfer_id"), entry.get("mm_hash")
    if not isinstance(transfer_id, str) or not is_new_transfer_id(transfer_id):
        text = "transfer_id must be a string of 1 to 1024 letters, digits and ._:=+@~-"
        raise InvalidRequest(text, param=f"{param}.transfer_id")
    if mm_hash is not None and not isinstance(mm_hash, str):
        raise InvalidRequest("mm_hash must be a string", param=f"{param}.mm_hash")
    return NamedTransfer(transfer_id=transfer_id, mm_hash=mm_hash)
