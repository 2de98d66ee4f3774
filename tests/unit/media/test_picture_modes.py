"""Every kind of picture becomes the very pixels that vLLM makes of it.

`decoded_by_vllm.json` holds files, and their pixels as the loader of vLLM 0.32.0 gave them; it is written by
`tests/interop/picture_files.py`, and the interoperability suite compares it with the vLLM that is installed.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from epdctl.worker.encode.picture import decode_picture

pytestmark = [pytest.mark.unit, pytest.mark.worker]

_PAGE = json.loads((Path(__file__).parent / "decoded_by_vllm.json").read_text())
PICTURES: dict[str, dict[str, Any]] = _PAGE["pictures"]
BACKGROUND: tuple[int, int, int] = tuple(_PAGE["background"])


def pixels(picture: Image.Image) -> list[Any]:
    """Return mode, size and pixels as the page has them."""
    return [picture.mode, list(picture.size), base64.b64encode(picture.tobytes()).decode()]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")  # Pillow says it of broken camera data
@pytest.mark.parametrize("name", PICTURES)
def test_pixels_are_those_of_vllm(name: str) -> None:
    """Mode, size and each byte are equal, over white and over the background that a request names."""
    data = base64.b64decode(PICTURES[name]["file"])

    assert pixels(decode_picture(data, max_pixels=1000)) == PICTURES[name]["white"]
    over = decode_picture(data, max_pixels=1000, background=BACKGROUND)
    assert pixels(over) == PICTURES[name]["background"]


def test_the_page_has_every_kind() -> None:
    """Six formats, each rotation, transparency of each kind, and all depths are on the page."""
    wanted = {
        "png", "jpeg", "webp", "gif", "bmp", "tiff", "transparent", "alpha", "rgba", "cmyk", "16 bits",
        "one bit", "palette", "turned", "two frames", "interlaced",
        *(f"orientation {n}" for n in range(1, 9)),
    }  # fmt: skip
    assert {word for word in wanted if not any(word in name for name in PICTURES)} == set()
