"""The checkpoint's video processor, without torchvision: decoded frames become patches for the tower.

Sizes are those of transformers' own functions; frames are resized with Pillow like pictures, where
transformers' video processors use torchvision (values differ by a few of 255 levels at most), then normalised
and cut exactly as they do: `temporal_patch_size` frames deep, the last frame repeated until that fits.

Rules of this file: how many rows a video will give is known, and checked, before a frame is decoded. Runs on
threads; nothing here changes after it is built.
"""

from __future__ import annotations

from typing import Any

import numpy
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as size_of_picture

from epdctl.domain import Modality
from epdctl.errors import MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.clip_size import size_of_clip
from epdctl.worker.encode.frames import FrameChoice, Sampling, Source, choose_frames, timestamps
from epdctl.worker.encode.layout import PATCHES, ItemLayout, Prepared
from epdctl.worker.encode.options import VideoOptions
from epdctl.worker.encode.video import ClipPlan, Frames, VideoDecoder, VideoLimits
from epdctl.worker.encode.video_config import VideoConfig


class VideoProcessor:
    """Decodes, resizes and cuts videos for one checkpoint; `close` it."""

    def __init__(self, config: VideoConfig, limits: VideoLimits, max_rows: int) -> None:
        self._config = config
        self._limits = limits
        self._max_rows = max_rows
        self._decoder = VideoDecoder()

    def close(self) -> None:
        """End the decoder processes."""
        self._decoder.close()

    def prepare(self, content: bytes, options: VideoOptions) -> Prepared:
        """Return the video in `content` cut into patches.

        Raises:
            UnsupportedMedia: a container or a shape that is not served.
            MediaUnavailable: broken, without frames, or over a limit.
        """
        choice = FrameChoice(
            sampling=options.sampling or self._config.kind,
            num_frames=options.num_frames,
            fps=options.fps,
            min_frames=options.min_frames,
            max_frames=options.max_frames,
        )

        def choose(source: Source) -> list[int]:
            chosen = choose_frames(source, choice)
            self._check_rows(len(chosen), *self._size(len(chosen), source.height, source.width, options))
            return chosen

        def size_of(source: Source, frames: int) -> tuple[int, int]:
            return self._size(frames, source.height, source.width, options)

        config = self._config
        plan = ClipPlan(choose=choose, size_of=size_of, resample=config.resample)
        clip = self._decoder.decode(content, plan, self._limits)
        frames, high, wide = clip.frames.shape[:3]
        pixels = cut(clip.frames, config)
        grid = (-(-frames // config.temporal), high // config.patch, wide // config.patch)
        metadata: dict[str, Any] = {"video_grid_thw": list(grid)}
        if config.kind is Sampling.QWEN3:
            metadata["timestamps"] = timestamps(clip.indices, clip.fps, config.temporal)
        layout = ItemLayout(
            modality=Modality.VIDEO,
            rows=grid[0] * grid[1] * grid[2] // config.merge**2,
            pixel_shape=pixels.shape,
            forward_group=PATCHES,
            geometry=grid,
            metadata=metadata,
        )
        return Prepared(pixels=pixels, layout=layout)

    def _size(self, frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
        """Return height and width that frames are resized to; raises UnsupportedMedia."""
        config = self._config
        low = options.min_pixels or config.shortest_edge
        high_bound = _capped(config, frames, low, options.max_pixels or config.longest_edge)
        bounds = {"factor": config.patch * config.merge, "min_pixels": low, "max_pixels": high_bound}
        try:
            if config.kind is Sampling.QWEN2:
                high, wide = size_of_picture(height, width, **bounds)
            else:
                high, wide = size_of_clip(frames, height, width, config.temporal, **bounds)
        except (ValueError, ZeroDivisionError) as error:
            text = f"a video of {frames} frames of {width}x{height} pixels cannot be cut for this model"
            raise UnsupportedMedia(text) from error
        return int(high), int(wide)

    def _check_rows(self, frames: int, height: int, width: int) -> None:
        config = self._config
        side = config.patch * config.merge
        rows = -(-frames // config.temporal) * (height // side) * (width // side)
        if rows < 1:
            raise UnsupportedMedia("the video is too small for this model")
        if rows > self._max_rows:
            text = f"the video gives {rows} embedding rows, more than {self._max_rows}"
            raise MediaUnavailable(f"{text} (--max-item-tokens)")


def _capped(config: VideoConfig, frames: int, low: int, high: int) -> int:
    """Return the upper bound of pixels (Qwen2: of a frame, Qwen3: of all) under the checkpoint's cap."""
    if config.token_cap is None:
        return high
    pixels, floor = config.token_cap * (config.patch * config.merge) ** 2, int(low * 1.05)
    if config.kind is Sampling.QWEN2:
        return max(min(high, int(pixels * 0.9) * config.temporal // frames), floor)
    return max(min(pixels, high // frames), floor) * frames


def cut(frames: Frames, config: VideoConfig) -> numpy.ndarray[Any, numpy.dtype[numpy.float32]]:
    """Return float32 patches `[t*h*w, channels * temporal * patch * patch]` of resized `frames`."""
    patch, temporal, merge = config.patch, config.temporal, config.merge
    if missing := -len(frames) % temporal:
        frames = numpy.concatenate((frames, numpy.repeat(frames[-1:], missing, axis=0)))
    time, (height, width), channels = len(frames) // temporal, frames.shape[1:3], frames.shape[3]
    high, wide = height // patch, width // patch
    pieces = frames.reshape(
        time, temporal, high // merge, merge, patch, wide // merge, merge, patch, channels
    ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    pieces = pieces.reshape(time * high * wide, channels, temporal * patch * patch)
    pixels = numpy.empty(pieces.shape, dtype=numpy.float32)
    for channel in range(channels):
        pixels[:, channel] = config.levels[channel][pieces[:, channel]]
    return pixels.reshape(len(pixels), -1)
