"""Pictures in every mode that people send, and what vLLM makes of them.

    python -m tests.interop.picture_files VLLM_PYTHON     # writes tests/unit/media/decoded_by_vllm.json

Rules of this file: what Pillow cannot write is put together by hand. The pixels are vLLM's own: its
`ImageMediaIO` reads each file, here nobody decodes.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[2]
DECODED = ROOT / "tests" / "unit" / "media" / "decoded_by_vllm.json"
SIZE = (9, 7)
BACKGROUND = [30, 60, 90]

_LOADER = """
import base64, json, sys
from vllm.multimodal.media.image import ImageMediaIO
files, background = json.load(sys.stdin)
plain, coloured = ImageMediaIO(), ImageMediaIO(rgba_background_color=background)
def pixels(loader, name):
    picture = loader.load_bytes(base64.b64decode(files[name])).media
    return [picture.mode, list(picture.size), base64.b64encode(picture.tobytes()).decode()]
print("DECODED" + json.dumps({n: [pixels(plain, n), pixels(coloured, n)] for n in files}))
"""


def decode_with_vllm(python: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """Return name -> [over white, over BACKGROUND], each mode, size and base64 of the pixels."""
    encoded = {name: base64.b64encode(data).decode() for name, data in files.items()}
    run = subprocess.run(
        [python, "-c", _LOADER],
        input=json.dumps([encoded, BACKGROUND]),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    line = next(line for line in run.stdout.splitlines() if line.startswith("DECODED"))
    found: dict[str, Any] = json.loads(line.removeprefix("DECODED"))
    return found


def picture_files() -> dict[str, bytes]:
    """Return the files by name."""
    return dict([*_pngs(), *_raw_pngs(), *_jpegs(), *_others(), *_animations()])


def _colours() -> Image.Image:
    picture = Image.new("RGB", SIZE)
    picture.putdata([(x * 28, y * 36, (x * y * 17) % 256) for y in range(SIZE[1]) for x in range(SIZE[0])])
    return picture


def _layered() -> Image.Image:
    picture = _colours().convert("RGBA")
    picture.putalpha(Image.frombytes("L", SIZE, bytes(n * 4 % 256 for n in range(SIZE[0] * SIZE[1]))))
    return picture


def _saved(picture: Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def _turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _pngs() -> Iterator[tuple[str, bytes]]:
    rgb, layered = _colours(), _layered()
    grey, palette = rgb.convert("L"), rgb.quantize(16)
    yield "png rgb", _saved(rgb, "PNG")
    yield "png rgba", _saved(layered, "PNG")
    yield "png grey", _saved(grey, "PNG")
    yield "png grey with alpha", _saved(layered.convert("LA"), "PNG")
    yield "png one bit", _saved(grey.convert("1"), "PNG")
    yield "png palette", _saved(palette, "PNG")
    yield "png palette of two bits", _saved(rgb.quantize(4), "PNG", bits=2)
    yield "png palette, one transparent", _saved(palette, "PNG", transparency=3)
    yield "png palette, alpha of each", _saved(palette, "PNG", transparency=bytes(range(0, 256, 16)))
    yield "png grey, one transparent", _saved(grey, "PNG", transparency=grey.getpixel((4, 3)))
    yield "png rgb, one transparent", _saved(rgb, "PNG", transparency=rgb.getpixel((4, 3)))
    yield "png grey of 16 bits", _saved(_sixteen(), "PNG")
    yield "png turned", _saved(rgb, "PNG", exif=_turned(6))
    yield "png rgba turned", _saved(layered, "PNG", exif=_turned(8))


def _sixteen() -> Image.Image:
    values = [n * 1031 % 65536 for n in range(SIZE[0] * SIZE[1])]
    return Image.frombytes("I;16", SIZE, struct.pack(f"<{len(values)}H", *values))


def _raw_pngs() -> Iterator[tuple[str, bytes]]:
    """Yield PNGs of 16 bits a channel and interlaced ones, which Pillow reads and does not write."""
    for name, kind, channels in (("rgb", 2, 3), ("rgba", 6, 4), ("grey with alpha", 4, 2)):
        rows = [
            b"\x00"
            + b"".join(struct.pack(">H", (n * 977 + y * 5003) % 65536) for n in range(SIZE[0] * channels))
            for y in range(SIZE[1])
        ]
        yield f"png {name} of 16 bits", _raw_png(kind, 16, b"".join(rows), interlace=0)
    passes = (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    )
    packed = b""
    for left, top, across, down in passes:
        for y in range(top, SIZE[1], down):
            row = bytes(_colours().getpixel((x, y))[1] for x in range(left, SIZE[0], across))
            packed += b"\x00" + row if row else b""
    yield "png interlaced", _raw_png(0, 8, packed, interlace=1)


def _raw_png(kind: int, depth: int, rows: bytes, *, interlace: int) -> bytes:
    header = struct.pack(">IIBBBBB", *SIZE, depth, kind, 0, 0, interlace)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + tag + body + struct.pack(">I", zlib.crc32(tag + body))
        for tag, body in parts
    )


def _jpegs() -> Iterator[tuple[str, bytes]]:
    rgb = _colours()
    yield "jpeg", _saved(rgb, "JPEG")
    yield "jpeg progressive", _saved(rgb, "JPEG", progressive=True)
    yield "jpeg grey", _saved(rgb.convert("L"), "JPEG")
    yield "jpeg cmyk", _saved(rgb.convert("CMYK"), "JPEG")
    for orientation in range(1, 9):
        yield f"jpeg orientation {orientation}", _saved(rgb, "JPEG", exif=_turned(orientation))
    yield "jpeg of an impossible orientation", _saved(rgb, "JPEG", exif=_turned(99))
    yield "jpeg with broken camera data", _saved(rgb, "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    yield "jpeg of two pictures", _saved(rgb, "MPO", save_all=True, append_images=[rgb.convert("L")])


def _others() -> Iterator[tuple[str, bytes]]:
    rgb, layered = _colours(), _layered()
    yield "webp", _saved(rgb, "WEBP")
    yield "webp lossless rgba", _saved(layered, "WEBP", lossless=True)
    yield "webp turned", _saved(rgb, "WEBP", lossless=True, exif=_turned(3))
    yield "gif", _saved(rgb.quantize(16), "GIF")
    yield "gif, one transparent", _saved(rgb.quantize(16), "GIF", transparency=3)
    yield "gif grey", _saved(rgb.convert("L"), "GIF")
    yield "bmp", _saved(rgb, "BMP")
    yield "bmp palette", _saved(rgb.quantize(16), "BMP")
    yield "bmp one bit", _saved(rgb.convert("1"), "BMP")
    yield "bmp rgba", _saved(layered, "BMP")
    yield "tiff", _saved(rgb, "TIFF")
    yield "tiff lzw", _saved(rgb, "TIFF", compression="tiff_lzw")
    yield "tiff rgba", _saved(layered, "TIFF")
    yield "tiff grey with alpha", _saved(layered.convert("LA"), "TIFF")
    yield "tiff cmyk", _saved(rgb.convert("CMYK"), "TIFF")
    yield "tiff grey of 16 bits", _saved(_sixteen(), "TIFF")
    yield "tiff of floats", _saved(rgb.convert("F"), "TIFF")
    yield "tiff of integers", _saved(rgb.convert("L").convert("I"), "TIFF")
    yield "tiff lab", _saved(Image.frombytes("LAB", SIZE, rgb.tobytes()), "TIFF")
    yield "tiff one bit", _saved(rgb.convert("1"), "TIFF", compression="group4")
    yield "tiff turned", _saved(rgb, "TIFF", tiffinfo={0x0112: 6})


def _animations() -> Iterator[tuple[str, bytes]]:
    first, second = _colours(), Image.new("RGB", SIZE, (0, 0, 255))
    for name, form, frames in (
        ("gif", "GIF", [first.quantize(16), second.quantize(16)]),
        ("png", "PNG", [first, second]),
        ("webp", "WEBP", [first, second]),
        ("tiff", "TIFF", [first, second]),
    ):
        options = {"lossless": True} if form == "WEBP" else {}
        yield (
            f"{name} of two frames",
            _saved(frames[0], form, save_all=True, append_images=frames[1:], **options),
        )


def main() -> None:
    """Write the files, and what vLLM makes of them."""
    files = picture_files()
    decoded = decode_with_vllm(Path(sys.argv[1]), files)
    rows = {
        name: {"file": base64.b64encode(files[name]).decode(), "white": white, "background": coloured}
        for name, (white, coloured) in decoded.items()
    }
    text = json.dumps({"background": BACKGROUND, "pictures": rows}, indent=1)
    DECODED.write_text(text + "\n")


if __name__ == "__main__":
    main()
