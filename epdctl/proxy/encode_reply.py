"""What an encoder reported about the items it was asked for, matched to them or refused.

Rules of this file:
- Pure. Positions (`item_indices`) match first, then the uuid that was sent. What can be read in two ways is
  an `UpstreamProtocol` error: a swapped embedding would be a wrong answer that looks right.
- Transfer ids are ours, by occurrence: a reply that groups equal items under one hash names only the last
  (seen on vLLM 0.32). Without a push (no consumer address) the encoder's own id counts.
- `mm_hash` is the encoder's word, never computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from epdctl.domain import MmHash, Modality, TransferId
from epdctl.errors import UpstreamProtocol
from epdctl.proxy.parts import MediaItem

_REFERENCE_KEY = "ec_items"


class _Entry(msgspec.Struct):
    """One reported feature; `modality` came with 0.33."""

    item_indices: list[int] | None = None
    metadata: dict[str, Any] | None = None
    modality: str | None = None
    transfer_id: str | None = None


class _Reply(msgspec.Struct):
    ec_transfer_params: dict[str, Raw] | None = None


_REPLY = msgspec.json.Decoder(_Reply)
_ENTRY = msgspec.json.Decoder(_Entry, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One processed output of an item; `metadata` is empty when the encoder named none."""

    mm_hash: MmHash
    modality: Modality
    metadata: Mapping[str, Any]
    transfer_id: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeReport:
    """What one call reported: features by item index, and the entries themselves by hash, as raw JSON.

    An item without features was not reported at all.
    """

    features: Mapping[int, tuple[Feature, ...]]
    entries: Mapping[str, Raw]


def read_encode_reply(
    body: bytes,
    items: Sequence[MediaItem],
    *,
    uuids: Mapping[int, str] | None,
    transfer_ids: Mapping[int, tuple[TransferId, ...]],
    is_pushed: bool,
) -> EncodeReport:
    """Return what the reply to a call for `items` reports.

    Raises:
        UpstreamProtocol: not the JSON of an encode reply, or it cannot be matched beyond doubt.
    """
    raw_entries = _read_entries(body)
    entries = {mm_hash: _read_entry(raw) for mm_hash, raw in raw_entries.items()}
    positions = _by_position(entries, sum(item.feature_count for item in items))
    features: dict[int, tuple[Feature, ...]] = {}
    first = 0
    for item in items:
        slots = range(first, first + item.feature_count)
        first = slots.stop
        uuid = uuids[item.index] if uuids is not None else None
        hashes = _hashes_of(item, slots, uuid, entries, positions, is_alone=len(items) == 1)
        ids = transfer_ids[item.index]
        features[item.index] = tuple(
            _feature(item, mm_hash, entries[mm_hash], ids[slot], is_pushed) for slot, mm_hash in hashes
        )
    return EncodeReport(features=features, entries=raw_entries)


def _read_entries(body: bytes) -> dict[str, Raw]:
    try:
        reported = _REPLY.decode(body).ec_transfer_params or {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamProtocol("the encoder's answer is not an encode reply") from error
    if _REFERENCE_KEY in reported:
        raise UpstreamProtocol("the encoder reported an item under a reserved name")
    return reported


def _read_entry(raw: Raw) -> _Entry:
    try:
        return _ENTRY.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamProtocol("the encoder reported an item in a shape that is not known") from error


def _by_position(entries: Mapping[str, _Entry], count: int) -> dict[int, str]:
    """Return the hash at each reported position."""
    positions: dict[int, str] = {}
    for mm_hash, entry in entries.items():
        for index in entry.item_indices or ():
            if not 0 <= index < count:
                raise UpstreamProtocol("the encoder reported an item that it was not asked for")
            if index in positions:
                raise UpstreamProtocol("the encoder reported two results for one item")
            positions[index] = mm_hash
    return positions


def _hashes_of(
    item: MediaItem,
    slots: range,
    uuid: str | None,
    entries: Mapping[str, _Entry],
    positions: Mapping[int, str],
    *,
    is_alone: bool,
) -> list[tuple[int, str]]:
    """Return (feature number within the item, hash) for what was reported about `item`, video first."""
    if item.feature_count == 2:
        return _video_with_audio(slots, entries, positions)
    by_position = positions.get(slots.start)
    if by_position is not None:
        return [(0, by_position)]
    unplaced = [mm_hash for mm_hash, entry in entries.items() if not entry.item_indices]
    if uuid in unplaced:
        return [(0, uuid)] if uuid is not None else []
    if is_alone and len(unplaced) == 1 == len(entries):
        return [(0, unplaced[0])]
    if unplaced:
        raise UpstreamProtocol("the encoder's results cannot be matched to the items")
    return []


def _video_with_audio(
    slots: range, entries: Mapping[str, _Entry], positions: Mapping[int, str]
) -> list[tuple[int, str]]:
    """Return both features of a video whose audio track is used; each needs a position and a modality."""
    if not entries:
        return []
    found = {positions.get(slot): slot - slots.start for slot in slots}
    if None in found or len(found) != 2 or len(entries) != 2:
        raise UpstreamProtocol("the encoder did not place a video and its audio")
    ordered = sorted(entries.items(), key=lambda pair: pair[1].modality != Modality.VIDEO)
    if [entry.modality for _, entry in ordered] != [Modality.VIDEO, Modality.AUDIO]:
        raise UpstreamProtocol("the encoder did not name a video and its audio")
    return [(found[mm_hash], mm_hash) for mm_hash, _ in ordered]


def _feature(item: MediaItem, mm_hash: str, entry: _Entry, ours: TransferId, is_pushed: bool) -> Feature:
    modality = item.modality if entry.modality is None else entry.modality
    if modality not in (item.modality, *([Modality.AUDIO] if item.feature_count == 2 else [])):
        raise UpstreamProtocol("the encoder reported another modality than it was asked for")
    reported = TransferId(entry.transfer_id) if entry.transfer_id else ours
    return Feature(
        mm_hash=MmHash(mm_hash),
        modality=Modality(modality),
        metadata=entry.metadata or {},
        transfer_id=ours if is_pushed else reported,
    )
