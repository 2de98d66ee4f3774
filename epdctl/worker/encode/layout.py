"""How one item lies in memory on its way through the encode worker, whatever its kind.

The front's processor makes it with the pixels; the tower alone reads `geometry`. Scheduler, cache, transfer
and reply see rows, metadata and groups, never a grid or a patch.

Rules of this file: plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from epdctl.domain import Modality

if TYPE_CHECKING:
    import numpy

FLOAT32_BYTES = 4
PATCHES = "patches"
"""The forward group of towers that take patches of any number of pictures and frames, each with its grid."""


class ItemLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One prepared item.

    rows: embedding rows that the tower gives for it.
    pixel_shape: shape of its float32 frame, elements.
    geometry: what the tower needs to know besides the pixels: (t, h, w) in patches for a Qwen tower, (height,
        width) of the picture where a tower cuts tiles, else nothing.
    forward_group: only items with the same text may share a forward.
    metadata: what the reply says of it, plain JSON values, named as vLLM names them; `{}`: nothing.
    """

    rows: int
    pixel_shape: tuple[int, ...]
    forward_group: str
    modality: Modality = Modality.IMAGE
    geometry: tuple[int, ...] = ()
    metadata: dict[str, Any] = {}

    @property
    def pixel_nbytes(self) -> int:
        """Bytes of the float32 frame."""
        return prod(self.pixel_shape) * FLOAT32_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An item for the tower: float32 values, contiguous, in the layout's shape."""

    pixels: numpy.ndarray[Any, numpy.dtype[numpy.float32]]
    layout: ItemLayout
