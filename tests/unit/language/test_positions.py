"""M-RoPE positions of prompts with images."""

from __future__ import annotations

import pytest

from epdctl.worker.language.positions import PlacedImage, image_rows, mrope_positions

pytestmark = pytest.mark.unit


def test_text_counts_up_on_all_axes() -> None:
    """A prompt without images has plain positions and no offset."""
    positions = mrope_positions(4, [], merge=2)

    assert (positions.time, positions.height, positions.width) == ((0, 1, 2, 3),) * 3
    assert positions.delta == 0


def test_an_image_is_a_grid_in_one_instant() -> None:
    """Rows and columns of merged patches count from where the image starts; time stands still."""
    positions = mrope_positions(9, [PlacedImage(offset=2, grid=(1, 4, 6))], merge=2)

    assert positions.time == (0, 1, 2, 2, 2, 2, 2, 2, 5)
    assert positions.height == (0, 1, 2, 2, 2, 3, 3, 3, 5)
    assert positions.width == (0, 1, 2, 3, 4, 2, 3, 4, 5)


def test_text_goes_on_behind_the_longer_side() -> None:
    """The offset of generated tokens is what the images saved against one position a token."""
    positions = mrope_positions(9, [PlacedImage(offset=2, grid=(1, 4, 6))], merge=2)

    assert positions.delta == 6 - 9


def test_a_second_image_starts_behind_the_first() -> None:
    """Each image starts where the text before it ends."""
    images = [PlacedImage(offset=1, grid=(1, 4, 4)), PlacedImage(offset=6, grid=(1, 2, 2))]
    positions = mrope_positions(8, images, merge=2)

    assert positions.width == (0, 1, 2, 1, 2, 3, 4, 5)


def test_rows_of_an_image_are_its_merged_patches() -> None:
    """A grid of 1 x 8 x 12 patches merged 2 x 2 has 24 rows."""
    assert image_rows((1, 8, 12), 2) == 24


def test_frames_of_a_video_are_steps_apart() -> None:
    """Time goes on by a step a frame group; text goes on behind the last of them where that is longest."""
    positions = mrope_positions(7, [PlacedImage(offset=1, grid=(4, 2, 2), step=2.0)], merge=2)

    assert positions.time == (0, 1, 3, 5, 7, 8, 9)
    assert positions.height == positions.width == (0, 1, 1, 1, 1, 8, 9)
    assert positions.delta == 10 - 7
