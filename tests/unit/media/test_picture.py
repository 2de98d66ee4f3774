"""Decoding pictures: modes, rotation, transparency, and everything that is broken."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import pytest
from PIL import Image

from epdctl.errors import EpdError, MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.picture import decode_picture

pytestmark = [pytest.mark.unit, pytest.mark.worker]

LIMIT = 1_000_000


def encoded(picture: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """Return `picture` as a file's bytes."""
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a PNG chunk."""
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png_of(width: int, height: int) -> bytes:
    """Return a tiny file that claims to be a grey PNG of `width` x `height`."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(b""))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(form: str) -> None:
    """Each served format gives its picture in RGB."""
    picture = decode_picture(encoded(Image.new("RGB", (8, 6), (255, 0, 0)), form), max_pixels=LIMIT)

    red, green, blue = picture.getpixel((4, 3))
    assert (picture.mode, picture.size) == ("RGB", (8, 6))
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize(
    ("picture", "form"),
    [
        (Image.new("L", (4, 4), 128), "PNG"),
        (Image.new("1", (4, 4), 1), "PNG"),
        (Image.new("P", (4, 4)), "PNG"),
        (Image.new("I;16", (4, 4), 30000), "PNG"),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG"),
        (Image.new("LA", (4, 4), (10, 255)), "PNG"),
        (Image.new("YCbCr", (4, 4)), "JPEG"),
    ],
    ids=lambda value: getattr(value, "mode", value),
)
def test_modes_become_rgb(picture: Image.Image, form: str) -> None:
    """Grey, palette, 16-bit, CMYK and other modes are converted."""
    assert decode_picture(encoded(picture, form), max_pixels=LIMIT).mode == "RGB"


@pytest.mark.parametrize(("background", "expected"), [((255, 255, 255), 255), ((0, 0, 0), 0)])
def test_transparency_is_laid_over_the_background(background: tuple[int, int, int], expected: int) -> None:
    """Fully transparent pixels show the background, whatever colour they hide."""
    hidden = encoded(Image.new("RGBA", (4, 4), (9, 99, 199, 0)))

    picture = decode_picture(hidden, max_pixels=LIMIT, background=background)

    assert picture.getpixel((1, 1)) == (expected,) * 3


def test_transparent_colour_of_a_palette_is_transparent() -> None:
    """A palette's transparent entry counts as transparency too."""
    picture = Image.new("P", (4, 4), 3)
    picture.putpalette([7, 7, 7] * 256)

    decoded = decode_picture(encoded(picture, transparency=3), max_pixels=LIMIT)

    assert decoded.getpixel((0, 0)) == (255, 255, 255)


def test_camera_rotation_is_applied() -> None:
    """A picture that says it was taken sideways is turned."""
    exif = Image.Exif()
    exif[0x0112] = 6

    turned = decode_picture(encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif), max_pixels=LIMIT)

    assert turned.size == (4, 8)


def test_first_frame_of_an_animation_counts() -> None:
    """Of an animated GIF the first frame is taken."""
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    animated = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])

    assert decode_picture(animated, max_pixels=LIMIT).getpixel((0, 0)) == (255, 0, 0)


WHOLE = encoded(Image.new("RGB", (64, 64), (1, 2, 3)), "BMP")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", MediaUnavailable),
        (b"this is not a png", UnsupportedMedia),
        (b"<html><body>404</body></html>", UnsupportedMedia),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", UnsupportedMedia),
        (encoded(Image.new("RGB", (2, 2)), "PPM"), UnsupportedMedia),
        (WHOLE[: len(WHOLE) // 2], MediaUnavailable),
        (png_of(64, 64), MediaUnavailable),
        (png_of(0, 64), EpdError),
        (encoded(Image.new("RGB", (64, 64)))[:-20], MediaUnavailable),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 64, EpdError),
        (b"GIF89a", EpdError),
        (b"II*\0" + b"\xff" * 32, EpdError),
    ],
    ids=[
        "empty",
        "text",
        "html",
        "postscript",
        "format not served",
        "half a bmp",
        "png without rows",
        "png of no width",
        "truncated png",
        "png of zeros",
        "gif header only",
        "tiff of ones",
    ],
)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")  # Pillow says it of a broken TIFF
def test_broken_picture_is_the_clients_fault(data: bytes, kind: type[EpdError]) -> None:
    """Whatever is wrong with the bytes, the answer is a 400 with a short text."""
    with pytest.raises(kind) as failure:
        decode_picture(data, max_pixels=LIMIT)

    assert failure.value.http_status == 400


@pytest.mark.parametrize("side", [1001, 20_000, 60_000])
def test_bomb_is_refused_by_its_header(side: int) -> None:
    """A file that claims more pixels than allowed is refused before any is decoded."""
    with pytest.raises(MediaUnavailable, match="more than 1000000 pixels"):
        decode_picture(png_of(side, 1000 if side == 1001 else side), max_pixels=LIMIT)


def claiming(form: str) -> bytes:
    """Return a small file in `form` whose header claims 20,000 x 20,000 pixels."""
    data = bytearray(encoded(Image.new("RGB", (16, 16)), form))
    if form == "GIF":
        data[6:10] = struct.pack("<HH", 20_000, 20_000)
    elif form == "BMP":
        data[18:26] = struct.pack("<ii", 20_000, 20_000)
    elif form == "WEBP":
        start = data.index(b"\x9d\x01\x2a") + 3
        data[start : start + 4] = struct.pack("<HH", 16_000, 16_000)
    elif form == "JPEG":
        start = data.index(b"\xff\xc0") + 5
        data[start : start + 4] = struct.pack(">HH", 20_000, 20_000)
    else:
        for tag in (0x0100, 0x0101):
            start = data.index(struct.pack("<HHI", tag, 4, 1))
            data[start : start + 12] = struct.pack("<HHII", tag, 4, 1, 20_000)
    return bytes(data)


@pytest.mark.parametrize("form", ["GIF", "BMP", "WEBP", "JPEG", "TIFF"])
def test_bomb_of_each_format_is_refused(form: str) -> None:
    """Whatever the format, the size that the header claims is checked before a pixel is decoded."""
    with pytest.raises(MediaUnavailable, match="more than 1000000 pixels"):
        decode_picture(claiming(form), max_pixels=LIMIT)


def test_bomb_in_a_text_chunk_is_refused() -> None:
    """Text that unpacks to 100 MB inside a small PNG is not unpacked."""
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(100_000_000)))
    whole = encoded(Image.new("RGB", (4, 4)))
    tracemalloc.start()
    try:
        with pytest.raises(MediaUnavailable):
            decode_picture(whole[:33] + text + whole[33:], max_pixels=LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("part", [0.05, 0.5])
def test_truncated_file_is_refused(form: str, part: float) -> None:
    """Of no format is a half-received file taken for a picture."""
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    data = encoded(noise, form)

    with pytest.raises(EpdError) as failure:
        decode_picture(data[: int(len(data) * part)], max_pixels=LIMIT)

    assert failure.value.http_status == 400


def test_single_pixel_is_a_picture() -> None:
    """One pixel is enough."""
    assert decode_picture(encoded(Image.new("RGB", (1, 1))), max_pixels=LIMIT).size == (1, 1)
