"""The bodies for prefill and decode: the client's fields, with media replaced by what the encoder reported.

Rules of this file:
- Pure. Every body is built from the client's original on each attempt; nothing of an earlier attempt can be
  in it. A field that has no reason to change keeps its bytes and its place.
- Either every media item becomes an embeds part, or every one stays raw with its uuid: consumers refuse a
  mixture, and one without metadata cannot be sized.
- `max_tokens`, `max_completion_tokens` and `min_tokens` of a prefill go down together; null means absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from epdctl.domain import TransferId
from epdctl.proxy.content import Request
from epdctl.proxy.cut import Body
from epdctl.proxy.encode_reply import EncodeReport, Feature
from epdctl.proxy.encode_request import write_part
from epdctl.proxy.parts import MediaItem
from epdctl.proxy.slices import has_value, read_list, read_object, read_value, write_list, write_object

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """All that the encoders reported about a request, by item index; empty for a text-only request.

    `uuids` is None with `--no-rewrite`: then no uuid goes to either side and media stay as they are.
    """

    features: Mapping[int, tuple[Feature, ...]]
    entries: Mapping[str, Raw]
    transfer_ids: Mapping[int, tuple[TransferId, ...]]
    uuids: Mapping[int, str] | None


NOTHING_ENCODED = Encoded(features={}, entries={}, transfer_ids={}, uuids={})


def gather_reports(
    reports: Sequence[EncodeReport],
    transfer_ids: Mapping[int, tuple[TransferId, ...]],
    uuids: Mapping[int, str] | None,
) -> Encoded:
    """Return the reports of all encoder calls of one attempt as one."""
    features: dict[int, tuple[Feature, ...]] = {}
    entries: dict[str, Raw] = {}
    for report in reports:
        features.update(report.features)
        entries.update(report.entries)
    return Encoded(features=features, entries=entries, transfer_ids=transfer_ids, uuids=uuids)


def is_raw_fallback(request: Request, encoded: Encoded) -> bool:
    """Say whether media stay raw because an item lacks the encoder's metadata (or nothing is rewritten)."""
    return encoded.uuids is None or not all(
        _has_metadata(encoded.features.get(item.index, ())) for item in request.items
    )


def _has_metadata(features: Sequence[Feature]) -> bool:
    return bool(features) and all(feature.metadata for feature in features)


def build_decode_body(request: Request, encoded: Encoded, kv_params: bytes | None) -> Body:
    """Return the body for decode, or for a combined prefill_decode, with `kv_params` (JSON) when given."""
    if request.is_untouched and kv_params is None:
        return (request.cut.source,)
    fields = _consumer_fields(request, encoded)
    if kv_params is not None:
        fields["kv_transfer_params"] = kv_params
    return request.cut.restore(write_object(fields))


def build_prefill_body(request: Request, encoded: Encoded, kv_params: bytes) -> Body:
    """Return the body for prefill: one token, one choice, no stream, the rest as the client sent it."""
    fields = _consumer_fields(request, encoded)
    fields["max_tokens"] = b"1"
    if has_value(request.fields, "max_completion_tokens"):
        fields["max_completion_tokens"] = b"1"
    if has_value(request.fields, "n"):
        fields["n"] = b"1"
    if has_value(request.fields, "min_tokens"):
        fields["min_tokens"] = _lowered(request.fields["min_tokens"])
    fields["stream"] = b"false"
    fields.pop("stream_options", None)
    fields["kv_transfer_params"] = kv_params
    return request.cut.restore(write_object(fields))


def build_whole_body(request: Request, uuids: Mapping[int, str] | None) -> Body:
    """Return the client's request with its media whole and no transfer named: nothing was handed over."""
    if request.is_untouched:
        return (request.cut.source,)
    fields: dict[str, Raw | bytes] = dict(request.fields)
    if request.items:
        fields["messages"] = _messages(request, _raw_parts(request.items, uuids))
    return request.cut.restore(write_object(fields))


def _lowered(min_tokens: Raw) -> bytes | Raw:
    value = read_value(min_tokens)
    is_above = isinstance(value, int | float) and not isinstance(value, bool) and value > 1
    return b"1" if is_above else min_tokens


def _consumer_fields(request: Request, encoded: Encoded) -> dict[str, Raw | bytes]:
    fields: dict[str, Raw | bytes] = dict(request.fields)
    if not request.items:
        return fields
    is_raw = is_raw_fallback(request, encoded)
    parts = _raw_parts(request.items, encoded.uuids) if is_raw else _embeds_parts(request.items, encoded)
    fields["messages"] = _messages(request, parts)
    fields["ec_transfer_params"] = _ec_params(request.items, encoded)
    return fields


def _raw_parts(items: Sequence[MediaItem], uuids: Mapping[int, str] | None) -> dict[int, bytes]:
    return {item.index: write_part(item, uuids[item.index] if uuids is not None else None) for item in items}


def _embeds_parts(items: Sequence[MediaItem], encoded: Encoded) -> dict[int, bytes]:
    assert encoded.uuids is not None
    return {
        item.index: _embeds_part(item, encoded.features[item.index], encoded.uuids[item.index])
        for item in items
    }


def _embeds_part(item: MediaItem, features: Sequence[Feature], uuid: str) -> bytes:
    metadata = {f"{feature.modality}_embeds": _flattened(feature.metadata) for feature in features}
    return _encode({"type": f"{item.modality}_embeds", **metadata, "uuid": uuid})


def _flattened(metadata: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the metadata with each value flattened one level, to the vector that consumers stack."""
    return {name: _vector(value) for name, value in metadata.items()}


def _vector(value: Any) -> list[Any]:
    rows = value if isinstance(value, list) else [value]
    return [cell for row in rows for cell in (row if isinstance(row, list) else [row])]


def _ec_params(items: Sequence[MediaItem], encoded: Encoded) -> bytes:
    wanted = [entry for item in items for entry in _ec_items(item, encoded)]
    return write_object({"ec_items": _encode(wanted), **encoded.entries})


def _ec_items(item: MediaItem, encoded: Encoded) -> list[dict[str, str]]:
    """Return the item's entries; one that was not reported keeps its place by transfer id alone."""
    features = encoded.features.get(item.index, ())
    if features:
        return [{"mm_hash": one.mm_hash, "transfer_id": one.transfer_id} for one in features]
    return [{"transfer_id": transfer_id} for transfer_id in encoded.transfer_ids[item.index]]


def _messages(request: Request, parts: Mapping[int, bytes]) -> bytes:
    """Return the request's messages with `parts` in the places of its media items."""
    messages: list[Raw | bytes] = list(read_list(request.fields["messages"]))
    by_message: dict[int, list[MediaItem]] = {}
    for item in request.items:
        by_message.setdefault(item.message, []).append(item)
    for number, items in by_message.items():
        message: dict[str, Raw | bytes] = dict(read_object(bytes(messages[number])))
        content: list[Raw | bytes] = list(read_list(bytes(message["content"])))
        for item in items:
            content[item.part] = parts[item.index]
        message["content"] = write_list(content)
        messages[number] = write_object(message)
    return write_list(messages)
