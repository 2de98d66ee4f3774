"""From an item's bytes to the tower's pixels, in one call that runs on a thread.

Rules of this file: the adapters in order, nothing else. The video decoder is imported when the first video
comes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

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
from epdctl.worker.encode.video_config import read_video_config
from epdctl.worker.engine import StartFailed

if TYPE_CHECKING:
    from epdctl.worker.encode.video_processor import VideoProcessor


def _image_processor(folder: Path, max_rows: int) -> ImageProcessor | FeatureProcessor:
    try:
        family = feature_family(AutoConfig.from_pretrained(folder))
    except NotServed as error:
        raise StartFailed(f"{folder}: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise StartFailed(f"{folder}: config.json cannot be read ({type(error).__name__})") from error
    if family is None:
        return ImageProcessor(folder, max_rows)
    return FeatureProcessor(folder, family, max_rows)


class Preparer:
    """Decodes and cuts items for the checkpoint in `folder`; raises StartFailed when it cannot."""

    def __init__(self, folder: Path, limits: PrepareLimits) -> None:
        # Pillow's own limit would refuse what --max-image-pixels allows; ours is checked by decode_picture.
        Image.MAX_IMAGE_PIXELS = None
        self._limits = limits
        self._images = _image_processor(folder, limits.max_rows)
        self._videos: VideoProcessor | None = None
        self._loading = threading.Lock()
        self._video_config = config = read_video_config(folder)
        self.identity = identity_of(self._images.identity, config.identity if config else None)

    def prepare(self, content: bytes, options: ItemOptions | VideoOptions) -> Prepared:
        """Return the pixels of the picture or video in `content`, which of them the options' type tells.

        Raises:
            MediaUnavailable, UnsupportedMedia: what it holds cannot be encoded; the text says why.
        """
        if isinstance(options, VideoOptions):
            return self._prepare_video(content, options)
        picture = decode_picture(content, max_pixels=self._limits.max_pixels, background=options.background)
        return self._images.prepare(picture, options)

    def _prepare_video(self, content: bytes, options: VideoOptions) -> Prepared:
        with self._loading:
            if self._videos is None:
                self._videos = self._load_videos()
        return self._videos.prepare(content, options)

    def _load_videos(self) -> VideoProcessor:
        if self._video_config is None:
            raise UnsupportedMedia("this model takes no videos")
        try:
            from epdctl.worker.encode.video import VideoLimits
            from epdctl.worker.encode.video_processor import VideoProcessor
        except ImportError as error:
            text = "this worker decodes no videos: the package opencv-python-headless is missing"
            raise UnsupportedMedia(text) from error
        limits = VideoLimits(
            max_frame_pixels=self._limits.max_pixels,
            max_frames=self._limits.max_video_frames,
            max_pixels=self._limits.max_video_pixels,
            timeout_s=self._limits.video_timeout_s,
        )
        return VideoProcessor(self._video_config, limits, self._limits.max_rows)
