"""Which frames of a video are taken."""

from __future__ import annotations

import pytest

from epdctl.worker.encode.frames import (
    FrameChoice,
    NoFrames,
    Sampling,
    Source,
    choose_frames,
    timestamps,
)

pytestmark = pytest.mark.unit


def chosen(frames: int, rate: float = 8.0, sampling: str = "opencv", **choice: float) -> list[int]:
    """Return the frames that are taken of a source."""
    source = Source(frames=frames, fps=rate, width=8, height=8)
    return choose_frames(source, FrameChoice(sampling=Sampling(sampling), **choice))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "frames", "choice", "expected"),
    [
        ("opencv", 10, {}, list(range(10))),
        ("opencv", 100, {"num_frames": 4}, [0, 33, 66, 99]),
        ("opencv", 16, {"fps": 2.0}, [0, 5, 10, 15]),
        ("opencv", 16, {"fps": 0.1}, [0]),
        ("opencv", 100, {"num_frames": 0}, list(range(100))),
        ("qwen2_vl", 16, {}, [0, 4, 8, 12]),
        ("qwen2_vl", 16, {"fps": 4.0}, [0, 2, 4, 6, 8, 10, 12, 14]),
        ("qwen2_vl", 16, {"num_frames": 2}, [0, 4, 8, 12]),
        ("qwen2_vl", 7, {}, [0, 1, 3, 5]),
        ("qwen2_vl", 3, {}, [0, 1]),
        ("qwen2_vl", 80, {"max_frames": 6}, [0, 13, 26, 40, 53, 66]),
        ("qwen3_vl", 16, {}, [0, 5, 10, 15]),
        ("qwen3_vl", 16, {"fps": 3.0}, [0, 3, 6, 9, 12, 15]),
        ("qwen3_vl", 3, {}, [0, 1, 2]),
        ("qwen3_vl", 16, {"min_frames": 1, "fps": 1.0}, [0, 15]),
    ],
)
def test_frames_of_each_sampling(
    sampling: str, frames: int, choice: dict[str, float], expected: list[int]
) -> None:
    """`num_frames` counts for uniform sampling only; the Qwen samplings follow `fps`, 2 by default."""
    assert chosen(frames, sampling=sampling, **choice) == expected


def test_uniform_sampling_takes_32_frames_by_default() -> None:
    """Without options 32 frames are taken over the whole length, first and last included."""
    places = chosen(1000)

    assert (len(places), places[0], places[-1]) == (32, 0, 999)


@pytest.mark.parametrize("sampling", ["opencv", "qwen2_vl", "qwen3_vl"])
def test_no_sampling_takes_what_is_not_there(sampling: str) -> None:
    """Whatever the length and rate, places ascend and lie inside the video."""
    for frames in range(2, 600, 7):
        for rate in (5.0, 23.976, 25.0, 29.97, 59.94):
            places = chosen(frames, rate, sampling)
            assert places == sorted(places)
            assert 0 <= places[0] <= places[-1] < frames


@pytest.mark.parametrize(
    ("frames", "rate", "sampling"), [(0, 8.0, "opencv"), (1, 8.0, "qwen2_vl"), (9, 0.0, "qwen2_vl")]
)
def test_source_without_usable_frames(frames: int, rate: float, sampling: str) -> None:
    """No frames, fewer than a patch is deep, or no rate where the rate decides: refused with the reason."""
    with pytest.raises(NoFrames):
        chosen(frames, rate, sampling)


@pytest.mark.parametrize(
    ("frames", "choice", "text"),
    [
        (16, {"max_frames": 1}, "media_io_kwargs.video.max_frames must be at least 2"),
        (1, {"max_frames": 1}, "the video has fewer than two frames"),
        (4, {"min_frames": 1}, r"media_io_kwargs.video \(fps, min_frames\) takes fewer than two"),
    ],
)
def test_what_leaves_no_frames_is_named(frames: int, choice: dict[str, float], text: str) -> None:
    """It is the video's fault only if it has too few frames; else the option is named."""
    with pytest.raises(NoFrames, match=text):
        chosen(frames, 8.0, "qwen2_vl", **choice)


def test_times_are_the_middles_of_groups() -> None:
    """Each group of frames has the middle of its first and last; an odd last frame stands alone."""
    assert timestamps([0, 4, 8], 8.0, 2) == [0.25, 1.0]
    assert timestamps([0, 12], 0.0, 2) == [0.25]
