"""The vision tower inside the test: what an encode worker would push.

Rules of this file: transformers' whole network, nothing of epdctl; float32, one picture at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from PIL import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One picture: its patch grid, and its rows with all deepstack levels side by side."""

    grid: tuple[int, int, int]
    rows: torch.Tensor

    @property
    def data(self) -> bytes:
        """The rows as they are pushed."""
        return self.rows.contiguous().view(torch.uint8).numpy().tobytes()


class Tower:
    """The tower and image processor of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._processor = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True
        )
        network = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        self._tower = network.model.visual.eval()

    @torch.no_grad()
    def encode(self, images: Sequence[Image.Image]) -> list[Encoded]:
        """Return the embedding of each picture."""
        return [self._encode(image.convert("RGB")) for image in images]

    def _encode(self, image: Image.Image) -> Encoded:
        seen = self._processor(images=[image], return_tensors="pt")
        out = self._tower(seen["pixel_values"], grid_thw=seen["image_grid_thw"])
        levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
        frames, height, width = seen["image_grid_thw"][0].tolist()
        return Encoded(grid=(frames, height, width), rows=torch.cat(levels, dim=1))
