"""Synthetic pictures: a ground in one of twelve colours, often with a figure on it, some noise and JPEG.

A picture is a function of its seed. Who may use which seeds:

    0 ..   999,999,999   training; run R uses R * 1,000,000 and up
    1,000,000,000 and up  `make-tiny-model --check` (the numbers in the model card)
    2,000,000,000 and up  tests
    3,000,000,000 and up  the pictures under `examples/`

Rules of this file: no torch, no files, no clock; every random number comes from the picture's own generator.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

TRAINING_SEEDS = 0
SEEDS_PER_RUN = 1_000_000
CHECK_SEEDS = 1_000_000_000
TEST_SEEDS = 2_000_000_000
EXAMPLE_SEEDS = 3_000_000_000

RGB = tuple[int, int, int]

# Each name covers the shades between a muted one and CSS's colour of that name.
COLOURS: dict[str, tuple[RGB, RGB]] = {
    "red": ((215, 30, 35), (255, 0, 0)),
    "green": ((35, 150, 50), (0, 128, 0)),
    "blue": ((35, 60, 210), (0, 0, 255)),
    "yellow": ((240, 220, 40), (255, 255, 0)),
    "orange": ((245, 135, 20), (255, 165, 0)),
    "purple": ((125, 40, 160), (128, 0, 128)),
    "pink": ((250, 150, 195), (255, 192, 203)),
    "brown": ((115, 70, 35), (165, 42, 42)),
    "black": ((18, 18, 18), (0, 0, 0)),
    "white": ((242, 242, 242), (255, 255, 255)),
    "gray": ((120, 120, 120), (136, 136, 136)),
    "cyan": ((40, 210, 220), (0, 255, 255)),
}
COLOUR_NAMES = tuple(COLOURS)
FIGURES = ("none", "circle", "square", "triangle")

SHORTEST_SIDE = 56
LONGEST_SIDE = 336


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An RGB image and what is true about it."""

    image: Image.Image
    colour: str
    figure: str
    seed: int


def draw_picture(
    seed: int, *, colour: str | None = None, figure: str | None = None, size: tuple[int, int] | None = None
) -> Picture:
    """Draw the picture of this seed; what is given instead of drawn changes nothing else about it.

    `size` is (width, height) in pixels, by default 56 to 336 a side with an aspect ratio of at most 1.65.
    Raises KeyError for an unknown colour and ValueError for an unknown figure.
    """
    rng = np.random.default_rng(seed)
    drawn_size = _draw_size(rng)
    drawn_colour = COLOUR_NAMES[rng.integers(len(COLOUR_NAMES))]
    drawn_figure = FIGURES[rng.integers(len(FIGURES))]
    colour, figure = colour or drawn_colour, figure or drawn_figure
    ground = _shade(rng, colour)
    image = Image.new("RGB", size or drawn_size, ground)
    _draw_figure(rng, image, figure, _shade(rng, _ink_on(ground)))
    if rng.random() < 0.6:
        image = _with_noise(rng, image)
    if rng.random() < 0.5:
        image = _through_jpeg(rng, image)
    return Picture(image=image, colour=colour, figure=figure, seed=seed)


def _draw_size(rng: np.random.Generator) -> tuple[int, int]:
    width = math.exp(rng.uniform(math.log(SHORTEST_SIDE), math.log(LONGEST_SIDE)))
    height = width * math.exp(rng.uniform(-0.5, 0.5))
    return round(width), round(min(LONGEST_SIDE, max(SHORTEST_SIDE, height)))


def _shade(rng: np.random.Generator, colour: str) -> RGB:
    muted, pure = COLOURS[colour]
    share = rng.random()
    mixed = (round(one + share * (other - one)) for one, other in zip(muted, pure, strict=True))
    red, green, blue = (int(np.clip(part + rng.integers(-14, 15), 0, 255)) for part in mixed)
    return red, green, blue


def _ink_on(ground: RGB) -> str:
    """Black on light grounds, white on dark ones: the ink says nothing more about the colour asked for."""
    red, green, blue = ground
    luminance = 0.3 * red + 0.59 * green + 0.11 * blue
    return "black" if luminance > 125 else "white"


def _draw_figure(rng: np.random.Generator, image: Image.Image, figure: str, ink: RGB) -> None:
    radius = min(image.size) * rng.uniform(0.2, 0.3)
    x, y = (rng.uniform(radius + 1, side - radius - 1) for side in image.size)
    box = (x - radius, y - radius, x + radius, y + radius)
    canvas = ImageDraw.Draw(image)
    match figure:
        case "circle":
            canvas.ellipse(box, fill=ink)
        case "square":
            canvas.rectangle(box, fill=ink)
        case "triangle":
            canvas.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=ink)
        case "none":
            pass
        case _:
            raise ValueError(f"unknown figure {figure!r}: one of {', '.join(FIGURES)}")


def _with_noise(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    amount = int(rng.integers(2, 14))
    pixels = np.asarray(image, dtype=np.int16)
    noise = rng.integers(-amount, amount + 1, size=pixels.shape, dtype=np.int16)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def _through_jpeg(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=int(rng.integers(45, 96)))
    with Image.open(packed) as opened:
        return opened.convert("RGB")
