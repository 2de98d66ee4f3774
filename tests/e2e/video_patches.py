"""What the encode worker's own processor makes of a video, to hand to the whole network.

Rules of this file: that these patches are transformers' is a claim of the unit tests.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from epdctl.worker.encode.layout import Prepared
from epdctl.worker.encode.options import VideoOptions
from epdctl.worker.encode.video import VideoLimits
from epdctl.worker.encode.video_config import read_video_config
from epdctl.worker.encode.video_processor import VideoProcessor


def prepared_video(folder: Path, data: bytes) -> Prepared:
    """Return the patches and the layout of the video `data` for the checkpoint in `folder`."""
    config = read_video_config(folder)
    assert config is not None
    limits = VideoLimits(max_frame_pixels=10**6, max_frames=64, max_pixels=10**7, timeout_s=30.0)
    with closing(VideoProcessor(config, limits, 10_000)) as processor:
        return processor.prepare(data, VideoOptions())
