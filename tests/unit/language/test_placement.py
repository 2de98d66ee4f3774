"""Images in a prompt's tokens, and the pushes that fill them."""

from __future__ import annotations

import pytest

from epdctl.domain import Modality
from epdctl.errors import InvalidRequest
from epdctl.worker.language.content import ImagePart
from epdctl.worker.language.placement import match_item, place_images
from epdctl.worker.language.request import EcItem
from tests.unit.language.small_spec import PAD, SPEC, VIDEO_PAD

pytestmark = pytest.mark.unit


def item(transfer_id: str | None, mm_hash: str | None) -> EcItem:
    """Return an ec_items entry."""
    return EcItem(transfer_id=transfer_id, mm_hash=mm_hash)


def test_a_placeholder_becomes_a_token_a_row() -> None:
    """Each image's placeholder is repeated for its rows, and its offset counts the ones before."""
    images = [ImagePart(grid=(1, 4, 4), uuid="a"), ImagePart(grid=(1, 2, 4), uuid="b")]
    ids, placed = place_images([1, PAD, 2, PAD, 3], images, [], spec=SPEC)

    assert ids == [1, PAD, PAD, PAD, PAD, 2, PAD, PAD, 3]
    assert [(p.mm_hash, p.offset, p.rows) for p in placed] == [("a", 1, 4), ("b", 6, 2)]


def test_videos_and_images_stand_where_the_template_put_them() -> None:
    """Each kind has its own placeholder, and a place of one kind never takes an item of the other."""
    items = [
        ImagePart(grid=(2, 2, 4), uuid="v", modality=Modality.VIDEO),
        ImagePart(grid=(1, 2, 2), uuid="i"),
    ]

    ids, placed = place_images([1, VIDEO_PAD, 2, PAD], items, [], spec=SPEC)

    assert ids == [1, *[VIDEO_PAD] * 4, 2, PAD]
    assert [(p.modality, p.offset, p.rows) for p in placed] == [("video", 1, 4), ("image", 6, 1)]
    with pytest.raises(InvalidRequest):
        place_images([1, PAD, 2, VIDEO_PAD], items, [], spec=SPEC)


@pytest.mark.parametrize("ids", [[1, 2], [1, PAD, PAD]])
def test_placeholders_in_the_text_are_refused(ids: list[int]) -> None:
    """A prompt with more or fewer placeholders than images is a client error, never a shifted image."""
    with pytest.raises(InvalidRequest) as refused:
        place_images(ids, [ImagePart(grid=(1, 2, 2), uuid="a")], [], spec=SPEC)

    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("items", "index", "expected"),
    [
        ([item("t0", "u")], 0, ("u", "t0")),
        ([item("t0", None)], 0, ("u", "t0")),
        ([item("t0", "other"), item("t1", "u")], 0, ("u", "t1")),
        ([item("t0", "u"), item("t1", "u")], 1, ("u", "t1")),
        ([item("t0", "other")], 0, ("other", "t0")),
        ([item("t0", "other"), item("t1", "third")], 0, ("u", None)),
        ([item(None, "u")], 0, ("u", None)),
        ([], 0, ("u", None)),
    ],
)
def test_an_image_finds_its_push(items: list[EcItem], index: int, expected: tuple[str, str | None]) -> None:
    """By position when the hash agrees, else by hash, else by position alone when the counts agree."""
    images = 2 if index or len(items) == 0 else 1

    assert match_item(index, "u", items, images) == expected
