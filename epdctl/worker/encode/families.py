"""Which models are served, and what is known of their towers before a weight is read.

    family_of(config)           # config: transformers' own; raises NotServed
    family.tiles_of(size), family.rows_of(size)

Two kinds: `patches` (Qwen: any number of patches of pictures and frames, each with its grid) and `features`
(LLaVA and Gemma 3: tiles of one size through transformers' `get_image_features`).

Rules of this file: reads configurations only. Rows are those that transformers' `get_image_features` gives;
the tower is asked at start-up whether that is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PATCH_TOWERS = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
}
FEATURE_MODELS = {"llava": "LlavaModel", "llava_next": "LlavaNextModel", "gemma3": "Gemma3Model"}
SERVED = (*PATCH_TOWERS, *FEATURE_MODELS)
_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


class NotServed(ValueError):
    """A model that this worker has no path for; the text says what is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFamily:
    """A model of tiles.

    side: height and width of a tile, pixels. rows: embedding rows of a tile.
    grids: sizes (height, width), pixels, that a picture may be laid out in; empty where it is one tile.
    patches: side of a tile in rows, where tiles are put together (LLaVA-NeXT).
    """

    model_type: str
    side: int
    channels: int
    rows: int
    grids: tuple[tuple[int, int], ...] = ()
    patches: int = 0

    @property
    def group(self) -> str:
        """The forward group of its items."""
        return f"tiles of {self.channels}x{self.side}x{self.side}"

    def tiles_of(self, size: Sequence[int]) -> int:
        """Return into how many tiles a picture of `size` (height, width) is cut."""
        if not self.grids:
            return 1
        high, wide = self._grid_of(size)
        return 1 + high * wide // self.side**2

    def _grid_of(self, size: Sequence[int]) -> tuple[int, int]:
        from transformers.image_processing_utils import select_best_resolution

        high, wide = select_best_resolution(tuple(size), self.grids)
        return high, wide

    def rows_of(self, size: Sequence[int]) -> int:
        """Return the rows of a picture of `size` (height, width).

        LLaVA-NeXT: the whole picture as one tile, then the tiles put together, without the rows and columns
        that only hold padding, and one row more at the end of each line.
        """
        if not self.grids:
            return self.rows
        height, width = size
        high, wide = (self.patches * edge // self.side for edge in self._grid_of(size))
        if width / height > wide / high:
            high -= (high - int(round(height * (wide / width), 7))) // 2 * 2
        else:
            wide -= (wide - int(round(width * (high / height), 7))) // 2 * 2
        return self.rows + int(high * (wide + 1))


def feature_family(config: Any) -> FeatureFamily | None:
    """Return what the configuration says of a model of tiles, or None for one of patches.

    Raises:
        NotServed: another model, or one of these families with a tower that is not served.
    """
    model_type = config.model_type
    if model_type in PATCH_TOWERS:
        return None
    if model_type not in FEATURE_MODELS:
        raise NotServed(f"model type '{model_type}' is not served (served: {', '.join(SERVED)})")
    vision = config.vision_config
    if vision.model_type not in _CLASS_TOKENS:
        towers = ", ".join(_CLASS_TOKENS)
        raise NotServed(f"a {model_type} with a {vision.model_type} is not served (served: {towers})")
    patches = vision.image_size // vision.patch_size
    if model_type == "gemma3":
        rows = config.mm_tokens_per_image
    else:
        is_cut = config.vision_feature_select_strategy == "default"
        rows = patches**2 + _CLASS_TOKENS[vision.model_type] - is_cut
    if model_type == "llava_next" and rows != patches**2:
        raise NotServed("a llava_next whose tiles have other features than their patches is not served")
    is_next = model_type == "llava_next"
    return FeatureFamily(
        model_type=model_type,
        side=vision.image_size,
        channels=vision.num_channels,
        rows=int(rows),
        grids=tuple((int(high), int(wide)) for high, wide in config.image_grid_pinpoints) if is_next else (),
        patches=patches,
    )
