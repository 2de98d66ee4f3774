"""What a checkpoint says of its videos: sizes, patches, normalisation, and how frames are chosen.

Rules of this file: files in, one frozen value out; neither the video decoder nor transformers is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy

from epdctl.worker.encode.frames import Sampling
from epdctl.worker.encode.keys import identity_of

_BICUBIC = 3
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_SIZES = {
    Sampling.QWEN2: {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
    Sampling.QWEN3: {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
}
"""Defaults of transformers' Qwen2VLVideoProcessor (pixels of a frame) and Qwen3VLVideoProcessor (of all)."""
_CAP = "cap_pixels_per_frame"
_TOKEN_CAPS = {Sampling.QWEN2: 128000, Sampling.QWEN3: 768}
_PROCESSORS = {"Qwen2VLVideoProcessor": Sampling.QWEN2, "Qwen3VLVideoProcessor": Sampling.QWEN3}
_MODELS = {"qwen2_vl": Sampling.QWEN2, "qwen2_5_vl": Sampling.QWEN2, "qwen3_vl": Sampling.QWEN3}
_STEPS = ("do_resize", "do_rescale", "do_normalize")
_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoConfig:
    """What a checkpoint says of its videos: pixel bounds, patches, and values of one level per channel."""

    kind: Sampling
    shortest_edge: int
    longest_edge: int
    patch: int
    temporal: int
    merge: int
    resample: int
    token_cap: int | None
    """Tokens that `cap_pixels_per_frame` counts with: of all frames (Qwen2), of one (Qwen3); None: no cap."""
    levels: numpy.ndarray[Any, numpy.dtype[numpy.float32]]
    identity: str


def read_video_config(folder: Path) -> VideoConfig | None:
    """Return the video settings of the checkpoint in `folder`, or None when its model takes no videos.

    The files and their order are transformers': `video_processor` in `processor_config.json`, the video
    processor's own file, the picture processor's.
    """
    model = _json(folder / "config.json").get("model_type")
    facts = _json(folder / "processor_config.json").get("video_processor")
    if not isinstance(facts, dict):
        facts = next((found for name in _FILES if (found := _json(folder / name))), {})
    kind = _PROCESSORS.get(str(facts.get("video_processor_type")), _MODELS.get(str(model)))
    if model not in _MODELS or kind is None or not all(facts.get(step, True) is True for step in _STEPS):
        return None
    size = _SIZES[kind] | {name: edge for name, edge in (facts.get("size") or {}).items() if edge}
    if kind is Sampling.QWEN2:
        size["shortest_edge"] = facts.get("min_pixels") or size["shortest_edge"]
        size["longest_edge"] = facts.get("max_pixels") or size["longest_edge"]
    is_clip = kind is Sampling.QWEN2
    mean = facts.get("image_mean") or (_CLIP_MEAN if is_clip else (0.5, 0.5, 0.5))
    std = facts.get("image_std") or (_CLIP_STD if is_clip else (0.5, 0.5, 0.5))
    return VideoConfig(
        kind=kind,
        shortest_edge=int(size["shortest_edge"]),
        longest_edge=int(size["longest_edge"]),
        patch=int(facts.get("patch_size") or (14 if is_clip else 16)),
        temporal=int(facts.get("temporal_patch_size") or 2),
        merge=int(facts.get("merge_size") or 2),
        resample=int(facts.get("resample", _BICUBIC)),
        token_cap=int(facts.get("max_video_tokens") or _TOKEN_CAPS[kind]) if facts.get(_CAP) else None,
        levels=_levels(mean, std, facts.get("rescale_factor", 1 / 255)),
        identity=identity_of(kind, facts, _decoder()),
    )


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes()) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _levels(mean: Any, std: Any, scale: float) -> numpy.ndarray[Any, numpy.dtype[numpy.float32]]:
    """Return `[channels, 256]`: each level rescaled and normalised in one step, as transformers does it."""
    level = numpy.arange(256, dtype=numpy.float32)
    shift = numpy.asarray(mean, dtype=numpy.float32)[:, None] / numpy.float32(scale)
    width = numpy.asarray(std, dtype=numpy.float32)[:, None] / numpy.float32(scale)
    levels: numpy.ndarray[Any, numpy.dtype[numpy.float32]] = (level - shift) / width
    return levels


def _decoder() -> str:
    try:
        return version("opencv-python-headless")
    except PackageNotFoundError:
        return "none"
