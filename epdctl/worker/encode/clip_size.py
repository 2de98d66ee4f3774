"""The size that Qwen3-VL's video processor brings frames to, as transformers 5.24 computes it.

transformers' own function lies in a module that imports torch, which a front does without.

Rules of this file: pure; sizes are pixels, bounds are pixels of all frames together.
"""

from __future__ import annotations

from math import ceil, floor, sqrt

MOST_ASPECT = 200


def size_of_clip(
    frames: int, height: int, width: int, temporal: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return height and width, multiples of `factor`, near the bounds and the aspect of the clip.

    Raises:
        ValueError: fewer frames than `temporal`, or sides of more than 200:1.
    """
    if frames < temporal:
        raise ValueError(f"{frames} frames are fewer than {temporal}")
    if min(height, width) < factor:
        grown = max(factor / height, factor / width)
        height, width = int(height * grown), int(width * grown)
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise ValueError(f"sides of more than {MOST_ASPECT}:1")
    deep = round(frames / temporal) * temporal
    high, wide = (round(side / factor) * factor for side in (height, width))
    if deep * high * wide > max_pixels:
        shrink = sqrt(frames * height * width / max_pixels)
        high, wide = (max(factor, floor(side / shrink / factor) * factor) for side in (height, width))
    elif deep * high * wide < min_pixels:
        grow = sqrt(min_pixels / (frames * height * width))
        high, wide = (ceil(side * grow / factor) * factor for side in (height, width))
    return high, wide
