"""From a picture's bytes to the tower's patches, in one call that runs on a thread.

Rules of this file: the two adapters in order, nothing else.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from epdctl.worker.encode.options import ItemOptions
from epdctl.worker.encode.picture import decode_picture
from epdctl.worker.encode.processor import ImageProcessor, Prepared


class Preparer:
    """Decodes and cuts pictures for the checkpoint in `folder`; raises StartFailed when it cannot."""

    def __init__(self, folder: Path, *, max_pixels: int, max_rows: int) -> None:
        # Pillow's own limit would refuse what --max-image-pixels allows; ours is checked by decode_picture.
        Image.MAX_IMAGE_PIXELS = None
        self._processor = ImageProcessor(folder, max_rows)
        self._max_pixels = max_pixels
        self.identity = self._processor.identity

    def prepare(self, content: bytes, options: ItemOptions) -> Prepared:
        """Return the patches of the picture in `content`; raises MediaUnavailable or UnsupportedMedia."""
        picture = decode_picture(content, max_pixels=self._max_pixels, background=options.background)
        return self._processor.prepare(picture, options)
