"""Decoding videos: which frames come out, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

from epdctl.errors import EpdError, MediaUnavailable, UnsupportedMedia
from epdctl.worker.encode.frames import NoFrames, Source
from epdctl.worker.encode.video import Clip, ClipPlan, VideoDecoder, VideoLimits
from tests.stubs.videos import clip, frame, index_first

pytestmark = [pytest.mark.unit, pytest.mark.worker]

LIMITS = VideoLimits(max_frame_pixels=10_000, max_frames=32, max_pixels=200_000, timeout_s=20.0)


@pytest.fixture(scope="module")
def decoder() -> Iterator[VideoDecoder]:
    """Run a decoder for the module."""
    made = VideoDecoder()
    yield made
    made.close()


def decode(
    decoder: VideoDecoder, data: bytes, choose: Callable[[Source], list[int]], limits: VideoLimits = LIMITS
) -> Clip:
    """Return the chosen frames in their own size."""
    plan = ClipPlan(choose=choose, size_of=lambda source, frames: (source.height, source.width))
    return decoder.decode(data, plan, limits)


def every_fourth(source: Source) -> list[int]:
    """Choose frames 0, 4, 8, …"""
    return list(range(0, source.frames, 4))


@pytest.mark.parametrize("form", ["mp4", "avi", "mkv"])
def test_chosen_frames_come_out(decoder: VideoDecoder, form: str) -> None:
    """The frames that were asked for come out as RGB, with their numbers and the rate of the source."""
    found = decode(decoder, clip(form=form), every_fourth)

    assert (found.indices, found.fps, found.frames.shape) == ([0, 4, 8, 12], 8.0, (4, 84, 112, 3))
    for place, decoded in zip(found.indices, found.frames, strict=True):
        expected = frame(place, 112, 84)[:, :, ::-1].astype(int)
        assert numpy.abs(decoded.astype(int) - expected).mean() < 6


def test_count_of_frames_is_the_headers(decoder: VideoDecoder) -> None:
    """The source that frames are chosen from has the clip's length, rate and size."""
    seen: list[Source] = []

    decode(decoder, clip(), lambda source: seen.append(source) or [0])

    assert seen == [Source(frames=16, fps=8.0, width=112, height=84)]


def nothing(source: Source) -> list[int]:
    """Choose from a video that has no frames."""
    raise NoFrames("the video has no frames")


WHOLE, MATROSKA = clip(form="avi"), clip(form="mkv")
INDEX_FIRST = index_first(clip(40, fps=20.0))
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", MediaUnavailable),
        (b"no video at all", UnsupportedMedia),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), UnsupportedMedia),
        (PLAYLIST, UnsupportedMedia),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", UnsupportedMedia),
        (WHOLE[:200], MediaUnavailable),
        (WHOLE[: len(WHOLE) // 2], MediaUnavailable),
        (clip()[:1000], MediaUnavailable),
        (MATROSKA[: len(MATROSKA) // 2], MediaUnavailable),
        (INDEX_FIRST[: len(INDEX_FIRST) * 3 // 4], MediaUnavailable),
        (b"\x00\x00\x00\x1cftypisom" + bytes(64), MediaUnavailable),
        (b"RIFF\x00\x00\x00\x00AVI " + bytes(64), MediaUnavailable),
    ],
    ids=[
        "empty",
        "text",
        "picture",
        "play list",
        "list of files",
        "header only",
        "half of it",
        "mp4 without its index",
        "half an mkv",
        "mp4 with its index, without its last frames",
        "mp4 of zeros",
        "avi of zeros",
    ],
)
def test_broken_video_is_refused(decoder: VideoDecoder, data: bytes, kind: type[EpdError]) -> None:
    """What is no video is refused before the decoder sees it, what is broken or cut off with that reason."""
    with pytest.raises(kind):
        decode(decoder, data, every_fourth)


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ({"max_frame_pixels": 112 * 84 - 1}, "--max-image-pixels"),
        ({"max_frames": 3}, "--max-video-frames"),
        ({"max_pixels": 4 * 112 * 84 - 1}, "--max-video-pixels"),
        ({"timeout_s": 1e-9}, "--video-timeout"),
    ],
)
def test_limit_is_named(decoder: VideoDecoder, limits: dict[str, float], flag: str) -> None:
    """A video over a limit is refused, and the answer names the flag that raises it."""
    bounds = {"max_frame_pixels": 10**6, "max_frames": 32, "max_pixels": 10**9, "timeout_s": 20.0} | limits

    with pytest.raises(MediaUnavailable, match=flag):
        decode(decoder, clip(), every_fourth, VideoLimits(**bounds))  # type: ignore[arg-type]


def test_video_without_frames_is_refused(decoder: VideoDecoder) -> None:
    """A way of sampling that finds no frames fails that video with its reason."""
    with pytest.raises(MediaUnavailable, match="no frames"):
        decode(decoder, clip(), nothing)


def test_last_frame_may_be_missing(decoder: VideoDecoder) -> None:
    """A header that counts one frame too many does not cost the video; more missing frames do."""
    found = decode(decoder, clip(), lambda source: [0, 2, 4, 6, 8, source.frames])
    assert found.indices == [0, 2, 4, 6, 8]

    with pytest.raises(MediaUnavailable, match="2 of 4 frames missing"):
        decode(decoder, clip(), lambda source: [0, 1, source.frames, source.frames + 1])


def test_file_that_crashes_the_decoder_costs_itself_only(decoder: VideoDecoder) -> None:
    """A changed byte that makes OpenCV 5.0 crash fails that video; the next, and this process, are well."""
    crashing = bytearray(clip(24, form="avi", width=64, height=48))
    crashing[11577] = 132

    with pytest.raises(MediaUnavailable):
        decode(decoder, bytes(crashing), every_fourth)

    assert decode(decoder, clip(), every_fourth).indices == [0, 4, 8, 12]


def test_process_that_dies_on_a_video_is_replaced(decoder: VideoDecoder) -> None:
    """A decoder process that is killed while it works fails its video with that reason, nothing else."""

    def kill(source: Source) -> list[int]:
        for child in list(decoder._busy):
            child.kill()
        return [0]

    with pytest.raises(MediaUnavailable, match="its decoder crashed on it"):
        decode(decoder, clip(), kill)

    assert decode(decoder, clip(), every_fourth).indices == [0, 4, 8, 12]


def test_damaged_files_never_cost_more_than_themselves(decoder: VideoDecoder) -> None:
    """Files with random damage are decoded or refused, each with an error of ours."""
    draw = random.Random(5)
    whole = [clip(24, form=form, width=64, height=48) for form in ("mp4", "avi", "mkv")]
    for _ in range(150):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.choice([1, 3, 10])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            decode(decoder, bytes(data), every_fourth)
        except EpdError as refused:
            assert refused.message

    assert decode(decoder, clip(), every_fourth).indices == [0, 4, 8, 12]


def test_pictures_do_not_load_the_video_decoder() -> None:
    """Preparing a picture imports no video decoder and starts no process for one."""
    model = Path(__file__).parents[3] / "models" / "tiny-vlm" / "qwen3_vl"
    program = f"""
import io, os, sys
from collections.abc import Callable, Iterator
from pathlib import Path
from PIL import Image
from epdctl.worker.encode.options import ItemOptions, PrepareLimits
from epdctl.worker.encode.preparer import Preparer
limits = PrepareLimits(
    max_pixels=10**6, max_rows=10**4, max_video_frames=8, max_video_pixels=10**6, video_timeout_s=1.0
)
out = io.BytesIO()
Image.new("RGB", (64, 64)).save(out, "PNG")
before = Path("/proc/self/task", str(os.getpid()), "children").read_text()
Preparer(Path({str(model)!r}), limits).prepare(out.getvalue(), ItemOptions())
after = Path("/proc/self/task", str(os.getpid()), "children").read_text()
sys.exit("cv2" in sys.modules or before != after)
"""

    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
