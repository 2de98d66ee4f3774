"""The checkpoint's image processor (transformers, PIL backend): a picture becomes patches for the tower.

Rules of this file: how many patches a picture will give is known, and checked, before it is resized; the
processor's exceptions end here. Runs on threads; the processor object is only read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import PIL
import transformers
from PIL import Image

from epdctl.errors import MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.keys import identity_of
from epdctl.worker.encode.layout import PATCHES, ItemLayout, Prepared
from epdctl.worker.encode.options import ItemOptions
from epdctl.worker.engine import StartFailed


def processor_identity(processor: Any) -> str:
    """Return a text that changes with anything that changes what `processor` makes of a picture."""
    facts = processor.to_dict()
    facts.pop("_processor_class", None)
    versions = (transformers.__version__, PIL.__version__, numpy.__version__)
    return identity_of(
        type(processor).__name__, repr(sorted(facts.items(), key=lambda fact: fact[0])), versions
    )


class ImageProcessor:
    """Resizes, normalises and cuts pictures as the checkpoint in `folder` wants them.

    Raises StartFailed when the folder has no image processor, or one of a kind that is not served.
    """

    def __init__(self, folder: Path, max_rows: int) -> None:
        try:
            self._processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise StartFailed(f"{folder}: no usable image processor ({type(error).__name__})") from error
        if not hasattr(self._processor, "get_number_of_image_patches"):
            name = type(self._processor).__name__
            raise StartFailed(f"{folder}: image processor {name} is not served")
        self._merge: int = self._processor.merge_size
        self._size: dict[str, int] = dict(self._processor.size)
        self._max_rows = max_rows

    @property
    def identity(self) -> str:
        """Changes with anything that changes the patches of a picture."""
        return processor_identity(self._processor)

    def prepare(self, picture: Image.Image, options: ItemOptions) -> Prepared:
        """Return `picture` (mode RGB) cut into patches.

        Raises:
            UnsupportedMedia: a shape that the processor refuses (Qwen: sides of more than 200:1).
            MediaUnavailable: more embedding rows than this worker encodes for one item.
        """
        low = options.min_pixels or self._size["shortest_edge"]
        high = options.max_pixels or self._size["longest_edge"]
        self._check_rows(picture, low, high)
        size = {"shortest_edge": low, "longest_edge": high}
        try:
            out = self._processor(images=[picture], size=size, return_tensors="np")
        except ValueError as error:
            raise UnsupportedMedia("the image processor refuses an image of this shape") from error
        time, height, width = (int(value) for value in out["image_grid_thw"][0])
        pixels = numpy.ascontiguousarray(out["pixel_values"], dtype=numpy.float32)
        layout = ItemLayout(
            rows=time * height * width // self._merge**2,
            pixel_shape=pixels.shape,
            forward_group=PATCHES,
            geometry=(time, height, width),
            metadata={"image_grid_thw": [time, height, width]},
        )
        return Prepared(pixels=pixels, layout=layout)

    def _check_rows(self, picture: Image.Image, low: int, high: int) -> None:
        bounds = {"min_pixels": low, "max_pixels": high}
        try:
            patches = self._processor.get_number_of_image_patches(picture.height, picture.width, bounds)
        except ValueError as error:
            size = f"{picture.width}x{picture.height}"
            raise UnsupportedMedia(
                f"an image of {size} pixels is too long and thin for this model"
            ) from error
        rows = patches // self._merge**2
        if rows < 1:
            raise UnsupportedMedia("the image is too small for this model")
        if rows > self._max_rows:
            limit = f"{self._max_rows} (--max-item-tokens)"
            raise MediaUnavailable(f"the image gives {rows} embedding rows, more than {limit}")
