"""Videos as patches, beside transformers' own video processors as far as they run without torchvision."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from epdctl.errors import EpdError, MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.frames import FrameChoice, Sampling, Source, choose_frames
from epdctl.worker.encode.layout import Prepared
from epdctl.worker.encode.options import VideoOptions
from epdctl.worker.encode.video import VideoLimits
from epdctl.worker.encode.video_child import resized
from epdctl.worker.encode.video_config import VideoConfig, read_video_config
from epdctl.worker.encode.video_processor import VideoProcessor, cut
from tests.stubs.videos import clip

pytestmark = [pytest.mark.unit, pytest.mark.worker]

MODELS = Path(__file__).parents[3] / "models" / "tiny-vlm"
LIMITS = VideoLimits(max_frame_pixels=10**7, max_frames=768, max_pixels=10**8, timeout_s=20.0)
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


def prepare(family: str, data: bytes, max_rows: int = 10_000, **options: Any) -> Prepared:
    """Return the patches of a video."""
    config = read_video_config(MODELS / family)
    assert config is not None
    return prepare_with(config, data, max_rows, **options)


def prepare_with(config: VideoConfig, data: bytes, max_rows: int = 10_000, **options: Any) -> Prepared:
    """Return the patches of a video under a configuration."""
    with closing(VideoProcessor(config, LIMITS, max_rows)) as processor:
        return processor.prepare(data, VideoOptions(**options))


@pytest.mark.parametrize("frames", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_patches_equal_those_of_transformers(family: str, frames: int) -> None:
    """Normalised and cut as transformers' video processor does it, an odd last frame repeated."""
    config = read_video_config(MODELS / family)
    assert config is not None
    side = config.patch * config.merge
    shape = (frames, 3 * side, 2 * side, 3)
    pixels = numpy.random.default_rng(1).integers(0, 256, shape, dtype=numpy.uint8)
    facts = json.loads((MODELS / family / "video_preprocessor_config.json").read_bytes())
    mean, std = (torch.tensor(facts[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    levels = (torch.from_numpy(pixels).permute(0, 3, 1, 2)[None] * facts["rescale_factor"] - mean) / std
    patchify: Any = Qwen3VLVideoProcessor.patchify
    expected, *grid = patchify(None, levels.float(), config.patch, config.merge, config.temporal)

    ours = cut(pixels, config)

    assert grid == [-(-frames // 2), 6, 4]
    numpy.testing.assert_allclose(ours, expected[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_still_video_has_the_patches_of_its_picture(family: str) -> None:
    """Two equal frames give what the picture processor, resizing included, gives for that frame."""
    config = read_video_config(MODELS / family)
    processor = AutoImageProcessor.from_pretrained(MODELS / family, backend="pil")
    assert config is not None
    still = numpy.random.default_rng(2).integers(0, 256, (90, 120, 3), dtype=numpy.uint8)
    seen = processor(images=[Image.fromarray(still)], return_tensors="np")
    _, high, wide = seen["image_grid_thw"][0] * config.patch

    ours = cut(resized(numpy.stack([still, still]), int(high), int(wide), config.resample), config)

    numpy.testing.assert_allclose(ours, seen["pixel_values"], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_of_a_video(family: str) -> None:
    """Two seconds at the default rate: four frames, two deep, with the metadata that vLLM declares."""
    prepared = prepare(family, clip())

    layout = prepared.layout
    assert layout.pixel_shape == prepared.pixels.shape
    time, high, wide = layout.geometry
    assert (time, layout.rows) == (2, high * wide // 2)
    assert layout.metadata["video_grid_thw"] == [time, high, wide]
    if family == "qwen3_vl":
        assert layout.metadata["timestamps"] == [2.5 / 8, 12.5 / 8]
    else:
        assert layout.metadata.keys() == {"video_grid_thw"}


@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_a_request_count(family: str) -> None:
    """Pixel bounds and the choice of frames change the grid."""
    few = prepare(family, clip(), sampling=Sampling.UNIFORM, num_frames=6)
    small = prepare(family, clip(), max_pixels=4 * 48 * 48, min_pixels=1)

    assert few.layout.geometry[0] == 3
    assert small.layout.rows < prepare(family, clip()).layout.rows


@pytest.mark.parametrize(
    ("data", "options", "kind", "text"),
    [
        (clip(), {"max_rows": 3}, MediaUnavailable, "--max-item-tokens"),
        (clip(1), {}, MediaUnavailable, "fewer than two frames"),
        (clip(width=2010, height=8), {}, UnsupportedMedia, "cannot be cut"),
    ],
)
def test_video_that_cannot_be_served(
    data: bytes, options: dict[str, Any], kind: type[EpdError], text: str
) -> None:
    """Too many rows, too few frames and shapes that no processor takes are refused with their reason."""
    with pytest.raises(kind, match=text):
        prepare("qwen2_5_vl", data, **options)


def test_sampling_equals_transformers() -> None:
    """The frames of the Qwen3 sampling are those of transformers; those of Qwen2 follow float32 steps."""
    sample: Any = Qwen3VLVideoProcessor.sample_frames
    for frames in range(1, 400, 13):
        for rate in (6.0, 24.0, 29.97, 60.0):
            source = Source(frames=frames, fps=rate, width=8, height=8)
            meta = type("Meta", (), {"total_num_frames": frames, "fps": rate})()
            qwen3 = choose_frames(source, FrameChoice(sampling=Sampling.QWEN3))
            assert qwen3 == sample(Qwen3VLVideoProcessor, meta, fps=2).tolist()
            if frames > 1:
                qwen2 = choose_frames(source, FrameChoice(sampling=Sampling.QWEN2))
                places = torch.arange(0, frames, frames / len(qwen2)).int().clamp(max=frames - 1)
                assert qwen2 == places.tolist()


@pytest.mark.parametrize(("family", "plain", "capped"), [("qwen2_5_vl", 24, 4), ("qwen3_vl", 12, 4)])
def test_cap_of_a_checkpoint_counts(tmp_path: Path, family: str, plain: int, capped: int) -> None:
    """`cap_pixels_per_frame` with few `max_video_tokens` leaves each frame its share (as transformers)."""
    for path in (MODELS / family).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    facts = json.loads((tmp_path / "video_preprocessor_config.json").read_bytes())
    edges = {"shortest_edge": 1, "longest_edge": facts["size"]["longest_edge"]}
    data, rows = clip(), []
    for change in (
        {},
        {"cap_pixels_per_frame": True, "max_video_tokens": 9 if family == "qwen2_5_vl" else 4},
    ):
        changed = facts | {"size": edges} | change
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(changed))
        config = read_video_config(tmp_path)
        assert config is not None
        rows.append(prepare_with(config, data).layout.rows)

    assert rows == [plain, capped]


def test_checkpoint_of_the_hub_without_a_video_file(tmp_path: Path) -> None:
    """Where only the picture processor's file is there its bounds hold, as in transformers; others: none."""
    facts = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')

    config = read_video_config(tmp_path)

    assert config is not None
    assert (config.kind, config.shortest_edge, config.longest_edge) == (Sampling.QWEN2, 3136, 12845056)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert read_video_config(tmp_path) is None
