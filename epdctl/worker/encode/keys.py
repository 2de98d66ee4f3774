"""What an embedding is a function of: cache keys, and the identifiers on the wire.

Rules of this file: values in, text out. A key covers the content's bytes and everything else that changes
the rows: modality, options, image processor, model, data type. A client's uuid names an item towards the
consumer, it is never part of a key: two pictures under one uuid must not share an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from epdctl.domain import Modality


def content_digest(data: bytes | bytearray | memoryview) -> str:
    """Return the blake3 hex digest of a media item's bytes as they were fetched."""
    return blake3(data).hexdigest()


def identity_of(*parts: object) -> str:
    """Return one short text for the facts in `parts` (plain JSON values), the same in every process."""
    return blake3(msgspec.json.encode(parts, order="sorted")).hexdigest(32)


def cache_key(*, content: str, modality: Modality, options: Mapping[str, Any], identity: str) -> str:
    """Return the key of an embedding.

    `content` is the digest of the bytes, `options` the processor and media options of the request,
    `identity` the `identity_of` image processor, model and data type.
    """
    facts = (content, modality.value, options, identity)
    return blake3(msgspec.json.encode(facts, order="sorted")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTransfer:
    """An entry of a request's `ec_items`: a transfer id, perhaps for one identifier only."""

    transfer_id: str
    mm_hash: str | None = None


def transfer_id_of(index: int, mm_hash: str, named: Sequence[NamedTransfer], fallback: str) -> str:
    """Return the transfer id of feature `index`, as a vLLM producer resolves it (0.32.0 and 0.33.0).

    Entry `index` if it names no identifier or this one; else the first entry with this identifier; else
    `<fallback>:<index>`, which nobody waits for.
    """
    if index < len(named) and named[index].mm_hash in (None, mm_hash):
        return named[index].transfer_id
    for entry in named:
        if entry.mm_hash == mm_hash:
            return entry.transfer_id
    return f"{fallback}:{index}"
