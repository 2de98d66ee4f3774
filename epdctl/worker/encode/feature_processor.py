"""The image processor of a model of tiles (LLaVA, LLaVA-NeXT, Gemma 3): a picture becomes tiles.

Rules of this file: the shape of a picture is checked before it is resized; the processor's exceptions end
here. Runs on threads; the processor object is only read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import transformers
from PIL import Image

from epdctl.errors import InvalidRequest, MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.families import FeatureFamily
from epdctl.worker.encode.keys import identity_of
from epdctl.worker.encode.layout import ItemLayout, Prepared
from epdctl.worker.encode.options import ItemOptions
from epdctl.worker.encode.processor import processor_identity
from epdctl.worker.engine import StartFailed

_MAX_RATIO = 200


class FeatureProcessor:
    """Resizes, normalises and tiles pictures as the checkpoint in `folder` wants them.

    Raises StartFailed when the folder has no image processor, or one whose tiles are not the tower's.
    """

    def __init__(self, folder: Path, family: FeatureFamily, max_rows: int) -> None:
        try:
            self._processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise StartFailed(f"{folder}: no usable image processor ({type(error).__name__})") from error
        self._family = family
        self._max_rows = max_rows
        self.identity = identity_of(processor_identity(self._processor), repr(family))
        if getattr(self._processor, "do_pan_and_scan", None):
            raise StartFailed(f"{folder}: pan and scan is not served (do_pan_and_scan)")
        self._check_tiles(folder)

    def _check_tiles(self, folder: Path) -> None:
        family = self._family
        tile = (family.channels, family.side, family.side)
        found = self._tiles(Image.new("RGB", (family.side, family.side))).shape[1:]
        if found != tile:
            text = f"{folder}: the image processor's tiles are {list(found)}, the tower's {list(tile)}"
            raise StartFailed(text)

    def prepare(self, picture: Image.Image, options: ItemOptions) -> Prepared:
        """Return `picture` (mode RGB) as tiles.

        Raises:
            InvalidRequest: options of a size; tiles have the tower's.
            UnsupportedMedia: a picture that is too long and thin.
            MediaUnavailable: more embedding rows than this worker encodes for one item.
        """
        if options.min_pixels is not None or options.max_pixels is not None:
            text = "this model's pictures have one size: min_pixels, max_pixels and size are not served"
            raise InvalidRequest(text, param="mm_processor_kwargs")
        if max(picture.size) > _MAX_RATIO * min(picture.size):
            text = f"an image of {picture.width}x{picture.height} pixels is too long and thin for this model"
            raise UnsupportedMedia(text)
        family = self._family
        size = (picture.height, picture.width)
        pixels = self._tiles(picture)
        rows = family.rows_of(size)
        if rows > self._max_rows:
            limit = f"{self._max_rows} (--max-item-tokens)"
            raise MediaUnavailable(f"the image gives {rows} embedding rows, more than {limit}")
        layout = ItemLayout(
            rows=rows,
            pixel_shape=pixels.shape,
            forward_group=family.group,
            geometry=size if family.grids else (),
        )
        return Prepared(pixels=pixels, layout=layout)

    def _tiles(self, picture: Image.Image) -> numpy.ndarray[Any, numpy.dtype[numpy.float32]]:
        try:
            out = self._processor(images=[picture], return_tensors="np")
        except (ValueError, ZeroDivisionError) as error:
            raise UnsupportedMedia("the image processor refuses an image of this shape") from error
        pixels = numpy.ascontiguousarray(out["pixel_values"], dtype=numpy.float32)
        return pixels.reshape(-1, *pixels.shape[-3:])
