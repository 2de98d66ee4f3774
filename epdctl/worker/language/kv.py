"""The key/value memory of the engine: one buffer, one region a sequence.

A region holds all layers of a sequence, token-major: `[layer][keys, values][token][head][dim]`. So the first
tokens of a layer's keys are one run of bytes, which is what a hand-over to another process writes.

Rules of this file: one allocation at start; regions are views of it and never outlive `free`.
"""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import torch

from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.transfer.arena import Arena
from epdctl.worker.transfer.arena import Region as ArenaRegion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvRegion:
    """KV of one sequence; `keys[layer]` and `values[layer]` are `[capacity, heads, dim]` views.

    `address` is that of its first byte, `capacity` in tokens.
    """

    place: ArenaRegion
    address: int
    capacity: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class KvPool:
    """All KV memory of a process."""

    def __init__(self, spec: ModelSpec, nbytes: int, device: torch.device) -> None:
        self._spec = spec
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.arena = Arena(nbytes)

    @property
    def tokens(self) -> int:
        """Tokens the whole pool can hold."""
        return self._buffer.numel() // self._spec.kv_bytes_per_token

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self._buffer.numel()

    @property
    def address(self) -> int:
        """Where the buffer starts, for registration with a transfer engine."""
        return self._buffer.data_ptr()

    def allocate(self, tokens: int) -> KvRegion | None:
        """Return room for `tokens` tokens in all layers, or None while there is none."""
        nbytes = tokens * self._spec.kv_bytes_per_token
        place = self.arena.allocate(nbytes)
        if place is None:
            return None
        spec = self._spec
        shape = (spec.layers, 2, tokens, spec.kv_heads, spec.head_dim)
        whole = self._buffer[place.offset : place.offset + nbytes].view(self._dtype).view(shape)
        keys = tuple(whole[layer, 0] for layer in range(spec.layers))
        values = tuple(whole[layer, 1] for layer in range(spec.layers))
        return KvRegion(
            place=place, address=self.address + place.offset, capacity=tokens, keys=keys, values=values
        )

    def free(self, region: KvRegion) -> None:
        """Take a region back."""
        self.arena.free(region.place)


def prefix_digest(region: KvRegion, tokens: int) -> str:
    """Return the blake3 hex of the first `tokens` tokens, part by part as they lie in the region."""
    digest = blake3.blake3()
    for keys, values in zip(region.keys, region.values, strict=True):
        for part in (keys, values):
            digest.update(part[:tokens].cpu().view(torch.uint8).reshape(-1).numpy().data)
    return digest.hexdigest()


def copy_prefix(source: KvRegion, target: KvRegion, tokens: int) -> None:
    """Copy the first `tokens` tokens of all layers."""
    pairs = zip(source.keys + source.values, target.keys + target.values, strict=True)
    for from_view, to_view in pairs:
        to_view[:tokens].copy_(from_view[:tokens])
