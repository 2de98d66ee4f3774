"""The identifier of an item: what vLLM's engines look for."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.domain import Modality
from epdctl.worker.encode.identifier import item_identifier

pytestmark = pytest.mark.unit

# Computed with vLLM 0.32.0's own hasher for model "models/tiny" and an image that its sender calls "u1".
VECTORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"min_pixels": 3136, "max_pixels": 50176},
        {},
        "898ecd1b2d8749aa70048092acfdc38c4a6797430505155dd96940f6b81a044a",
    ),
    (
        {
            "images_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 50176}},
            "do_x": True,
            "s": 1.5,
            "n": None,
            "l": [1, "a"],
        },
        {},
        "e4a1037db86146cff077ef2f3f23e63ade13d3c1ed97d45c5047f3a834ba0d54",
    ),
    (
        {"max_pixels": 50176},
        {"image": {"rgba_background_color": [1, 2, 3]}},
        "8d590aeddcb2c66d2a27969a25a7132bfbf8a2015ebf3f543fe13b90534ed3eb",
    ),
]


def identifier(processor: dict[str, Any], media: dict[str, Any], model: str = "models/tiny") -> str:
    """Return the identifier of image "u1" with these options."""
    return item_identifier(
        model=model,
        modality=Modality.IMAGE,
        uuid="u1",
        processor_options=processor,
        media_options=media,
    )


@pytest.mark.parametrize(("processor", "media", "expected"), VECTORS)
def test_options_give_vllms_digest(processor: dict[str, Any], media: dict[str, Any], expected: str) -> None:
    """With options in force the identifier is the digest that a vLLM engine computes."""
    assert identifier(processor, media) == expected


def test_without_options_it_is_the_uuid() -> None:
    """Without options, or with options of other modalities only, the identifier is the uuid itself."""
    of_others = {"videos_kwargs": {"fps": 2}, "audio_kwargs": {"rate": 16000}}

    assert [identifier({}, {}), identifier(of_others, {"video": {"num_frames": 4}})] == ["u1", "u1"]


def test_model_and_order_count() -> None:
    """Another model, or the same options in another order, is another identifier, as in vLLM."""
    options = {"min_pixels": 3136, "max_pixels": 50176}
    turned = dict(reversed(options.items()))

    assert len({identifier(options, {}), identifier(turned, {}), identifier(options, {}, "other")}) == 3
