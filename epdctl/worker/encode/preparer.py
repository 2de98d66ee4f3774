"""From an item's bytes to the tower's pixels, in one call that runs on a thread.

Rules of this file: the adapters in order, nothing else. Decoder processes for videos start when the first
video comes.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from transformers import AutoConfig

from epdctl.errors import UnsupportedMedia
from epdctl.worker.encode.families import NotServed, feature_family
from epdctl.worker.encode.feature_processor import FeatureProcessor
from epdctl.worker.encode.keys import identity_of
from epdctl.worker.encode.layout import Prepared
from epdctl.worker.encode.options import ItemOptions, PrepareLimits, VideoOptions
from epdctl.worker.encode.picture import decode_picture
from epdctl.worker.encode.processor import ImageProcessor
from epdctl.worker.encode.video import VideoLimits
from epdctl.worker.encode.video_config import VideoConfig, read_video_config
from epdctl.worker.encode.video_processor import VideoProcessor
from epdctl.worker.engine import StartFailed
from epdctl.worker.model_folder import unreadable_config


def _image_processor(folder: Path, max_rows: int) -> ImageProcessor | FeatureProcessor:
    try:
        family = feature_family(AutoConfig.from_pretrained(folder))
    except NotServed as error:
        raise StartFailed(f"{folder}: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise StartFailed(f"--model {unreadable_config(folder, error)}") from error
    if family is None:
        return ImageProcessor(folder, max_rows)
    return FeatureProcessor(folder, family, max_rows)


def _video_processor(config: VideoConfig, limits: PrepareLimits) -> VideoProcessor:
    bounds = VideoLimits(
        max_frame_pixels=limits.max_pixels,
        max_frames=limits.max_video_frames,
        max_pixels=limits.max_video_pixels,
        timeout_s=limits.video_timeout_s,
    )
    return VideoProcessor(config, bounds, limits.max_rows)


class Preparer:
    """Decodes and cuts items for the checkpoint in `folder`; raises StartFailed when it cannot."""

    def __init__(self, folder: Path, limits: PrepareLimits) -> None:
        # Pillow's own limit would refuse what --max-image-pixels allows; ours is checked by decode_picture.
        Image.MAX_IMAGE_PIXELS = None
        self._max_pixels = limits.max_pixels
        self._images = _image_processor(folder, limits.max_rows)
        config = read_video_config(folder)
        self._videos = None if config is None else _video_processor(config, limits)
        self.identity = identity_of(self._images.identity, config.identity if config else None)

    def close(self) -> None:
        """End the video decoders."""
        if self._videos is not None:
            self._videos.close()

    def prepare(self, content: bytes, options: ItemOptions | VideoOptions) -> Prepared:
        """Return the pixels of the picture or video in `content`, which of them the options' type tells.

        Raises:
            MediaUnavailable, UnsupportedMedia: what it holds cannot be encoded; the text says why.
        """
        if isinstance(options, VideoOptions):
            if self._videos is None:
                raise UnsupportedMedia("this model takes no videos")
            return self._videos.prepare(content, options)
        picture = decode_picture(content, max_pixels=self._max_pixels, background=options.background)
        return self._images.prepare(picture, options)
