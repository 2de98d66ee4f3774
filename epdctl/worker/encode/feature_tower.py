"""The towers of LLaVA, LLaVA-NeXT and Gemma 3, through transformers' own `get_image_features`.

Rules of this file: see `vision`. The model is built whole on the meta device and its language model is taken
out before a weight is read, so tower and projector are all that is ever held. Pixels are
`[tiles, channels, side, side]`; the geometry of a LLaVA-NeXT picture is its (height, width).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import init_empty_weights

from epdctl.errors import EncodeFailed
from epdctl.worker.encode.acceleration import Compile
from epdctl.worker.encode.families import FEATURE_MODELS, FeatureFamily, feature_family
from epdctl.worker.encode.layout import ItemLayout
from epdctl.worker.encode.vision import Outputs, Tower


class FeatureTower(Tower):
    """See the module."""

    def __init__(self, module: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(module, config, dtype, device)
        family = feature_family(config)
        assert family is not None, "the kind of tower was chosen by it"
        self._family: FeatureFamily = family

    @staticmethod
    def build(config: Any) -> Any:
        """Return the model without its language model."""
        package = f"transformers.models.{config.model_type}.modeling_{config.model_type}"
        kind = getattr(importlib.import_module(package), FEATURE_MODELS[config.model_type])
        config.vision_config._attn_implementation = "sdpa"
        with init_empty_weights(include_buffers=False):
            module = kind(config)
        del module.language_model
        return module

    def blank(self, scale: int = 1) -> tuple[torch.Tensor, ItemLayout]:
        """Return a blank picture that fills its tiles, whatever the scale: tiles have one size."""
        family = self._family
        high, wide = family.grids[0] if family.grids else (family.side, family.side)
        shape = (family.tiles_of((high, wide)), family.channels, family.side, family.side)
        layout = ItemLayout(
            rows=family.rows_of((high, wide)),
            pixel_shape=shape,
            forward_group=family.group,
            geometry=(high, wide) if family.grids else (),
        )
        return torch.zeros(shape), layout

    def compile_with(self, backend: Compile) -> None:
        """Compile `get_image_features`: the model itself is never called."""
        features = self._module.get_image_features
        self._module.get_image_features = torch.compile(features, backend=backend, dynamic=True)

    def takes(self, layout: ItemLayout) -> bool:
        """Return whether tiles, size and rows belong together."""
        family = self._family
        tile = (family.channels, family.side, family.side)
        if layout.forward_group != family.group or layout.pixel_shape[1:] != tile:
            return False
        if len(layout.geometry) != (2 if family.grids else 0) or min(layout.geometry, default=1) < 1:
            return False
        size = layout.geometry
        return layout.pixel_shape[0] == family.tiles_of(size) and layout.rows == family.rows_of(size)

    def encode(self, items: Sequence[tuple[torch.Tensor, ItemLayout]]) -> Outputs:
        """Run one forward over all tiles."""
        sizes = [layout.geometry for _, layout in items]
        options = {"image_sizes": torch.tensor(sizes, device=self._device)} if self._family.grids else {}
        try:
            with torch.inference_mode():
                out = self._module.get_image_features(self._placed(items), **options)
        except (RuntimeError, ValueError, IndexError) as error:
            raise EncodeFailed("the vision tower failed on this item") from error
        pieces = list(out.pooler_output)
        if [len(piece) for piece in pieces] != [layout.rows for _, layout in items]:
            found = [len(piece) for piece in pieces]
            raise EncodeFailed(f"the vision tower gave {found} rows, other than the pictures' sizes ask for")
        return Outputs(items=tuple((piece,) for piece in pieces), dtype=self._dtype)
