"""The identifier of an item, as vLLM's engines derive it from the item's uuid.

A vLLM consumer looks for a pushed embedding under its own identifier of the item. Without processor or media
options that is the uuid; with options it is a digest of model, uuid and options, which the encoder must find
too. Same in vLLM 0.32.0 and 0.33.0 (`multimodal/hasher.py`, `multimodal/processing/inputs.py`).

Rules of this file: values in, text out. The order of the options' keys counts, as they came in the request.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from blake3 import blake3

from epdctl.domain import Modality

_SCOPED = {"images_kwargs": Modality.IMAGE, "videos_kwargs": Modality.VIDEO, "audio_kwargs": Modality.AUDIO}
_NULL, _LIST, _MAPPING, _LEAF = b"\x00", b"\x01", b"\x02", b"\x03"


def item_identifier(
    *,
    model: str,
    modality: Modality,
    uuid: str,
    processor_options: Mapping[str, Any],
    media_options: Mapping[str, Any],
) -> str:
    """Return the identifier of an item that its sender calls `uuid`.

    `model` is the engines' `--model` as it was given, `processor_options` and `media_options` the request's
    `mm_processor_kwargs` and `media_io_kwargs` (plain JSON values).
    """
    options = _options_in_force(modality, processor_options, media_options)
    if not options:
        return uuid
    facts = {"model_id": model, modality.value: uuid, **options}
    digest = blake3()
    for key in sorted(facts):
        digest.update(_framed(key.encode()))
        for piece in _pieces(facts[key]):
            digest.update(piece)
    return digest.hexdigest()


def _options_in_force(
    modality: Modality, processor: Mapping[str, Any], media: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that count for `modality`, without those that are empty."""
    own = {name: value for name, value in processor.items() if _SCOPED.get(name, modality) is modality}
    of_medium = media.get(modality.value) or {}
    options = {
        "media_io_kwargs": {modality.value: of_medium} if of_medium else {},
        "mm_processor_kwargs": own,
    }
    return {name: value for name, value in options.items() if value}


def _pieces(value: Any) -> Iterator[bytes]:
    if value is None:
        yield _NULL
    elif isinstance(value, list):
        yield _LIST + _length(value)
        for entry in value:
            yield from _pieces(entry)
    elif isinstance(value, dict):
        yield _MAPPING + _length(value)
        for name, entry in value.items():
            yield _framed(name.encode())
            yield from _pieces(entry)
    else:
        yield _LEAF + _framed(_leaf(value))


def _leaf(value: str | bool | int | float) -> bytes:
    """Return a JSON value's bytes as numpy lays them out on a 64-bit little-endian machine."""
    match value:
        case str():
            return value.encode()
        case bool():
            return struct.pack("<?", value)
        case int():
            return struct.pack("<q", value)
        case float():
            return struct.pack("<d", value)


def _framed(content: bytes) -> bytes:
    return _length(content) + content


def _length(value: bytes | list[Any] | dict[str, Any]) -> bytes:
    return len(value).to_bytes(8, "little")
