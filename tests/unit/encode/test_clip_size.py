"""The size of a clip's frames is transformers' own."""

from __future__ import annotations

import random

import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from epdctl.worker.encode.clip_size import size_of_clip

pytestmark = [pytest.mark.unit, pytest.mark.worker]


def test_sizes_are_those_of_transformers() -> None:
    """Over small, large, long and thin clips and all kinds of bounds, sizes and refusals are the same."""
    draw = random.Random(7)
    refused = 0
    for _ in range(3000):
        frames = draw.choice((1, 2, 3, 8, 33, 768))
        height, width = (int(2 ** draw.uniform(0, 12)) for _ in range(2))
        low = draw.choice((1, 4096, 128 * 32 * 32))
        bounds = {
            "factor": draw.choice((28, 32)),
            "min_pixels": low,
            "max_pixels": low * draw.choice((1, 6, 999)),
        }
        try:
            expected = smart_resize(frames, height, width, 2, **bounds)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match=r"frames|sides"):
                size_of_clip(frames, height, width, 2, **bounds)
            continue
        assert size_of_clip(frames, height, width, 2, **bounds) == expected
    assert refused > 100
