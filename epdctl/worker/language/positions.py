"""Multimodal rotary positions (M-RoPE) of a prompt, from the grids of its images and videos alone.

Qwen2-VL, Qwen2.5-VL and Qwen3-VL number a still image's tokens in the same way: one step in time, rows and
columns of merged patches, and text goes on behind the image's longer side. transformers keeps the offset of
a running request on the module (`rope_deltas`), one value for everybody; here it belongs to the request.

Frame groups of a video (Qwen2-VL, Qwen2.5-VL) are a step of positions apart in time. Text goes on behind the
largest position of any axis, as the models were trained and vLLM counts; transformers 5.24 looks at rows and
columns only, so that text after a long video would stand inside it.

Rules of this file: integers in, integers out; no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Grid = tuple[int, int, int]
"""Frames, patch rows and patch columns of one image, before merging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """A run of placeholder tokens: where in the prompt it starts, its grid, positions between its frames."""

    offset: int
    grid: Grid
    step: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Positions of a prompt's tokens on the three axes; token `i` behind the prompt is at `i + delta`."""

    time: tuple[int, ...]
    height: tuple[int, ...]
    width: tuple[int, ...]
    delta: int


def image_rows(grid: Grid, merge: int) -> int:
    """Return how many embedding rows, and so placeholder tokens, an image of `grid` patches has."""
    frames, height, width = grid
    return frames * height * width // merge**2


def mrope_positions(length: int, images: Sequence[PlacedImage], merge: int) -> Positions:
    """Return the positions of a prompt of `length` tokens with `images` in prompt order.

    Agrees with `get_rope_index` of transformers 5.24 for still images of all three model families, and for
    videos that are no longer in time than in space (tested).
    """
    time: list[int] = []
    height: list[int] = []
    width: list[int] = []
    start = 0
    for image in images:
        start = _append_text(time, height, width, start, image.offset - len(time))
        start = _append_image(time, height, width, start, image, merge)
    start = _append_text(time, height, width, start, length - len(time))
    return Positions(time=tuple(time), height=tuple(height), width=tuple(width), delta=start - length)


def _append_text(time: list[int], height: list[int], width: list[int], start: int, count: int) -> int:
    run = range(start, start + count)
    for axis in (time, height, width):
        axis.extend(run)
    return start + count


def _append_image(
    time: list[int], height: list[int], width: list[int], start: int, image: PlacedImage, merge: int
) -> int:
    frames, rows, columns = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
    for frame in range(frames):
        for row in range(rows):
            time.extend([start + int(frame * image.step)] * columns)
            height.extend([start + row] * columns)
            width.extend(range(start, start + columns))
    return start + max(rows, columns, int((frames - 1) * image.step) + 1)
