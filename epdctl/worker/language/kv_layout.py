"""Where the parts of a sequence's KV lie: `[layer][keys, values][token][head][dim]`, see `kv.py`.

Rules of this file: pure arithmetic on addresses, tokens and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from epdctl.worker.language.kv_messages import KvShape
from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.transfer.lanes import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A region: its first byte's address, and how many tokens each of its parts has room for."""

    address: int
    capacity: int


def shape_of(spec: ModelSpec) -> KvShape:
    """Return what both ends of a hand-over must agree on."""
    return KvShape(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, dtype=spec.dtype)


def copy_pieces(spec: ModelSpec, source: Extent, target: Extent, tokens: int) -> list[Piece]:
    """Return the writes that bring the first `tokens` tokens of all layers from `source` to `target`."""
    if tokens > source.capacity or tokens > target.capacity:
        raise ValueError(f"{tokens} tokens do not fit from {source.capacity} into {target.capacity}")
    parts = 2 * spec.layers
    row = spec.kv_bytes_per_token // parts
    return [
        Piece(
            source=source.address + part * source.capacity * row,
            destination=target.address + part * target.capacity * row,
            nbytes=tokens * row,
        )
        for part in range(parts)
    ]
