"""What one content part of a message is: plain, a media item, or something that must not pass.

Rules of this file:
- Pure; every refusal names the place as `messages[i].content[j]`.
- What a part is follows vLLM's reading (0.33): its `type`, or its media key where the type is missing or a
  uuid is set. A part that could be read in two ways is refused.
- A client never names an embedding: `*_embeds` in any shape is refused, because one such part ends a vLLM
  engine when nobody stored the embedding (seen on 0.32).
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Raw

from epdctl.domain import Modality
from epdctl.errors import InvalidRequest, UnsupportedMedia
from epdctl.proxy.slices import Fields, first_byte, has_value, object_or_none, read_value

_MODALITY_BY_KEY = {
    "image_url": Modality.IMAGE,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
    "video_url": Modality.VIDEO,
}
_KEY_BY_TYPE = {**{key: key for key in _MODALITY_BY_KEY}, "input_image": "image_url"}
_EMBEDS_SUFFIX = "_embeds"
_IN_PROCESS_TYPES = frozenset({"image_pil"})
_FETCHED_SCHEMES = frozenset({b"http", b"https", b"file"})
_HEAD_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One image, audio or video part of a request.

    `message` and `part` say where it stands; `fields` is the part without the client's uuid, `client_uuid`
    that uuid as raw JSON, empty when there is none. `is_inline` tells that the media itself is in the body,
    so that its bytes are its identity. `feature_count` is 2 for a video whose audio track is used, else 1.
    """

    index: int
    modality: Modality
    message: int
    part: int
    fields: Fields
    client_uuid: bytes
    is_inline: bool
    feature_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRules:
    """What reading a part depends on: the placeholder token, and whether a video's audio track is used."""

    token: bytes
    audio_in_video: bool


def read_part(fields: Fields, rules: PartRules, *, index: int, message: int, part: int) -> MediaItem | None:
    """Return the media item in a part, number `index` of its request, or None for a part without media.

    Raises:
        InvalidRequest: the type is no string.
        UnsupportedMedia: embeddings, a uuid without media, two media, or a shape that is not served.
    """
    where = f"messages[{message}].content[{part}]"
    refuse_embeds(fields, where)
    key = _media_key(fields, where)
    if key is None:
        return None
    modality = _MODALITY_BY_KEY[key]
    return MediaItem(
        index=index,
        modality=modality,
        message=message,
        part=part,
        fields={name: raw for name, raw in fields.items() if name != "uuid"},
        client_uuid=bytes(fields["uuid"]) if has_value(fields, "uuid") else b"",
        is_inline=_is_inline(fields[key], key, f"{where}.{key}", rules.token),
        feature_count=2 if rules.audio_in_video and modality is Modality.VIDEO else 1,
    )


def refuse_embeds(fields: Fields, where: str) -> None:
    """Raise UnsupportedMedia when a part is, or carries, embeddings."""
    kind = _part_type(fields, where) or ""
    is_embeds = kind.endswith(_EMBEDS_SUFFIX) or kind in _IN_PROCESS_TYPES
    if is_embeds or any(name.endswith(_EMBEDS_SUFFIX) for name in fields):
        raise UnsupportedMedia(
            "embeddings cannot be sent by clients; send the media itself (image_url, audio_url, video_url)",
            param=where,
        )


def _part_type(fields: Fields, where: str) -> str | None:
    if not has_value(fields, "type"):
        return None
    value = read_value(fields["type"])
    if not isinstance(value, str):
        raise InvalidRequest("a part's type must be a string", param=f"{where}.type")
    return value


def _media_key(fields: Fields, where: str) -> str | None:
    """Return the key that holds the part's media, or None for a part that is no media item."""
    kind = _part_type(fields, where)
    present = [key for key in _MODALITY_BY_KEY if key in fields]
    wanted = _KEY_BY_TYPE.get(kind) if kind is not None else (present[0] if present else None)
    if wanted is None:
        if present or has_value(fields, "uuid"):
            raise UnsupportedMedia("a part with media or a uuid must have a media type", param=where)
        return None
    if any(key != wanted for key in present):
        raise UnsupportedMedia(f"the part must have {wanted} and no other media", param=where)
    if not has_value(fields, wanted):
        raise UnsupportedMedia(f"{wanted} is missing: media cannot be named by uuid alone", param=where)
    return wanted


def _is_inline(raw: Raw, key: str, where: str, token: bytes) -> bool:
    """Say whether the media is in the body; raise when it is neither inline nor behind a URL."""
    holder = object_or_none(raw)
    name = "data" if key == "input_audio" else "url"
    if holder is None and key == "input_audio":
        raise UnsupportedMedia("input_audio must be an object with data and format", param=where)
    text = raw if holder is None else holder.get(name, Raw(b""))
    place = where if holder is None else f"{where}.{name}"
    if first_byte(text) != b'"':
        raise UnsupportedMedia(f"{name} must be a string", param=place)
    return key == "input_audio" or _is_data_url(text, token, place)


def _is_data_url(text: Raw, token: bytes, place: str) -> bool:
    head = bytes(memoryview(text)[1 : 1 + max(_HEAD_BYTES, len(token))])
    if token and head.startswith(token):
        return True
    if b"\\" in head:
        # Any character may be written as an escape; then only decoding tells.
        head = read_value(text)[:_HEAD_BYTES].encode()
    scheme = head[:_HEAD_BYTES].partition(b":")[0].lower()
    if scheme != b"data" and scheme not in _FETCHED_SCHEMES:
        raise UnsupportedMedia("a media URL must start with data:, http:, https: or file:", param=place)
    return scheme == b"data"
