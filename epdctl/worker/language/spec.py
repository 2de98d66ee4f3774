"""Facts of a language model that decisions need: sizes, special tokens.

Rules of this file: plain data; `checkpoint.py` reads them from a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from epdctl.domain import Modality

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes that are served, with the bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Facts of a language model; sizes in elements, `dtype` a torch dtype name without prefix.

    `levels` is the number of deepstack levels, so a pushed row is `hidden_size * (1 + levels)` wide.
    """

    family: str
    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    dtype: str
    levels: int
    merge: int
    image_token_id: int
    eos_token_ids: tuple[int, ...]
    video_token_id: int | None = None
    """Placeholder of a video; None when this worker takes none of this model."""
    frame_step: float = 1.0
    """Positions from one frame group of a video to the next, at one second a group."""

    def placeholder(self, modality: Modality) -> int | None:
        """Return the token that stands for a row of `modality`; None where there is none."""
        return {Modality.IMAGE: self.image_token_id, Modality.VIDEO: self.video_token_id}.get(modality)

    @property
    def embedding_width(self) -> int:
        """Elements of one pushed embedding row."""
        return self.hidden_size * (1 + self.levels)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token has in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]
