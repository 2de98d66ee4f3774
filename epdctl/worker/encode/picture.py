"""Decodes a picture's bytes to RGB, as vLLM 0.33.0 does before its image processor.

The camera's rotation is applied first; transparency is laid over a background, palette and grey with
transparency included; every other mode is converted to RGB. Of an animation the first frame counts.

Rules of this file: Pillow is told which formats it may try, never all (some start external programs); the
size is checked before a pixel is decoded; Pillow's exceptions end here. Runs on a thread, never on a loop.
"""

from __future__ import annotations

import io
import struct

from PIL import Image, ImageOps, UnidentifiedImageError

from epdctl.errors import MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.options import WHITE

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError, MemoryError, OverflowError)
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)


def decode_picture(data: bytes, *, max_pixels: int, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Return the picture in `data` in mode RGB.

    Raises:
        UnsupportedMedia: the bytes are in none of the formats that are served.
        MediaUnavailable: empty, broken, truncated, or more than `max_pixels` pixels.
    """
    if not data:
        raise MediaUnavailable("the image is empty (0 bytes)")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        if picture.width * picture.height > max_pixels:
            raise _too_many_pixels(max_pixels)
        return _to_rgb(_upright(picture), background)
    except UnidentifiedImageError as error:
        raise UnsupportedMedia(f"the data is no image in a format served ({', '.join(FORMATS)})") from error
    except _BOMBS as error:
        raise _too_many_pixels(max_pixels) from error
    except _BROKEN as error:
        raise MediaUnavailable("the image is broken or truncated") from error


def _too_many_pixels(max_pixels: int) -> MediaUnavailable:
    return MediaUnavailable(f"the image has more than {max_pixels} pixels (--max-image-pixels)")


def _upright(picture: Image.Image) -> Image.Image:
    picture.load()
    try:
        return ImageOps.exif_transpose(picture)
    except _BROKEN:
        return picture  # unreadable camera data says nothing about the pixels


def _to_rgb(picture: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if picture.mode == "RGB":  # with a transparent colour too: vLLM leaves it as it is
        return picture
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        layered = picture.convert("RGBA")
        flat = Image.new("RGB", layered.size, background)
        flat.paste(layered, mask=layered.getchannel("A"))
        return flat
    return picture.convert("RGB")
