"""The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of pictures and videos together in one forward.

Rules of this file: see `vision`. Pixels are `[t*h*w, patch elements]` with (t, h, w) as geometry; t is 1 for
a picture. An item gives `t*h*w / merge^2` rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import init_empty_weights

from epdctl.errors import EncodeFailed
from epdctl.worker.encode.families import PATCH_TOWERS
from epdctl.worker.encode.layout import PATCHES, ItemLayout
from epdctl.worker.encode.vision import Outputs, Tower


class PatchTower(Tower):
    """See the module."""

    def __init__(self, module: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(module, config, dtype, device)
        vision = config.vision_config
        self.merge: int = vision.spatial_merge_size
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        self.patch_elements: int = channels * vision.temporal_patch_size * vision.patch_size**2

    @staticmethod
    def build(config: Any) -> Any:
        """Return the bare tower."""
        package = f"transformers.models.{config.model_type}.modeling_{config.model_type}"
        kind = getattr(importlib.import_module(package), PATCH_TOWERS[config.model_type])
        config.vision_config._attn_implementation = "sdpa"
        # Parameters on meta until their weights are assigned; buffers are real, some are in no checkpoint.
        with init_empty_weights(include_buffers=False):
            return kind(config.vision_config)

    def blank(self, scale: int = 1) -> tuple[torch.Tensor, ItemLayout]:
        """Return a blank picture of `2 * scale` merged patches a side."""
        side = 2 * scale * self.merge
        pixels = torch.zeros(side * side, self.patch_elements)
        return pixels, ItemLayout(
            rows=(2 * scale) ** 2, pixel_shape=pixels.shape, forward_group=PATCHES, geometry=(1, side, side)
        )

    def takes(self, layout: ItemLayout) -> bool:
        """Return whether pixels and rows are those of the grid."""
        if layout.forward_group != PATCHES or len(layout.geometry) != 3 or min(layout.geometry) < 1:
            return False
        time, height, width = layout.geometry
        patches = time * height * width
        return (
            height % self.merge == 0
            and width % self.merge == 0
            and layout.pixel_shape == (patches, self.patch_elements)
            and layout.rows == patches // self.merge**2
        )

    def encode(self, items: Sequence[tuple[torch.Tensor, ItemLayout]]) -> Outputs:
        """Run one forward over all patches; levels of deepstack follow the merged output."""
        rows = [layout.rows for _, layout in items]
        grids = torch.tensor([layout.geometry for _, layout in items], device=self._device)
        try:
            with torch.inference_mode():
                out = self._module(self._placed(items), grid_thw=grids)
        except (RuntimeError, ValueError, IndexError) as error:
            raise EncodeFailed("the vision tower failed on this item") from error
        levels = (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))
        for level in levels:
            if level.shape[0] != sum(rows):
                text = f"the vision tower gave {level.shape[0]} rows where the grids ask for {sum(rows)}"
                raise EncodeFailed(text)
        pieces = [level.split(rows) for level in levels]
        return Outputs(items=tuple(zip(*pieces, strict=True)), dtype=self._dtype)
