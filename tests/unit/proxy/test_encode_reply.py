"""What an encoder reported, matched to the items or refused."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.errors import UpstreamProtocol
from epdctl.proxy.encode_reply import read_encode_reply
from tests.unit.proxy.build import LONG_URL, chat, ids_for, image, read_reply, user, uuids_for

pytestmark = pytest.mark.unit

GRID = {"image_grid_thw": [1, 8, 8]}
ONE = chat(user(image()))
TWO = chat(user(image(), image(LONG_URL + "B")))
VIDEO = chat(
    user(
        {"type": "video_url", "video_url": {"url": LONG_URL}},
        mm_processor_kwargs={"use_audio_in_video": True},
    )
)


def hashes(report: Any) -> dict[int, list[str]]:
    """Return the reported hashes by item."""
    return {index: [feature.mm_hash for feature in features] for index, features in report.features.items()}


def test_positions_match_first() -> None:
    """Entries name the positions they belong to, in whatever order they come."""
    report = read_reply(TWO, {"b": {"item_indices": [1]}, "a": {"item_indices": [0], "metadata": GRID}})

    assert hashes(report) == {0: ["a"], 1: ["b"]}
    assert report.features[0][0].metadata == GRID
    assert report.features[1][0].metadata == {}


def test_equal_items_share_an_entry_and_keep_their_transfer_ids() -> None:
    """Hazard 38: one entry for two equal items names only the last id; each occurrence keeps its own."""
    report = read_reply(TWO, {"same": {"item_indices": [0, 1], "metadata": GRID, "transfer_id": "t1.0"}})

    assert hashes(report) == {0: ["same"], 1: ["same"]}
    assert [report.features[index][0].transfer_id for index in (0, 1)] == ["t0.0", "t1.0"]


def test_without_positions_the_uuid_matches() -> None:
    """An encoder that reports no positions is matched by the uuid it was sent."""
    report = read_reply(TWO, {"uuid-1": {"metadata": GRID}, "uuid-0": {}})

    assert hashes(report) == {0: ["uuid-0"], 1: ["uuid-1"]}


def test_a_single_item_takes_the_single_entry() -> None:
    """Processing options change the hash; one item and one entry still belong together."""
    assert hashes(read_reply(ONE, {"rehashed": {"metadata": GRID}})) == {0: ["rehashed"]}


@pytest.mark.parametrize("entries", [None, {}])
def test_nothing_reported(entries: Any) -> None:
    """An encoder that reports nothing leaves its items without features; that is no protocol error."""
    assert hashes(read_reply(ONE, entries)) == {0: []}


def test_an_item_that_is_not_reported_has_no_features() -> None:
    """Where positions are given, an item without one was not reported."""
    assert hashes(read_reply(TWO, {"a": {"item_indices": [0]}})) == {0: ["a"], 1: []}


def test_the_encoders_own_id_counts_when_nothing_is_pushed() -> None:
    """Without a consumer address the encoder's transfer id is the handle."""
    report = read_reply(ONE, {"a": {"item_indices": [0], "transfer_id": "theirs"}}, is_pushed=False)

    assert report.features[0][0].transfer_id == "theirs"


def test_a_video_with_audio_has_two_features_in_order() -> None:
    """Video comes first, and each keeps the transfer id of its position."""
    report = read_reply(
        VIDEO,
        {"a": {"item_indices": [0], "modality": "audio"}, "v": {"item_indices": [1], "modality": "video"}},
    )

    assert [(f.mm_hash, f.transfer_id) for f in report.features[0]] == [("v", "t0.1"), ("a", "t0.0")]


@pytest.mark.parametrize(
    ("request_", "entries"),
    [
        (ONE, {"a": {"item_indices": [1]}}),
        (ONE, {"a": {"item_indices": [-1]}}),
        (ONE, {"a": {"item_indices": [0, 0]}}),
        (ONE, {"a": {"item_indices": ["0"]}}),
        (ONE, {"a": {"item_indices": [True]}}),
        (ONE, {"a": {"item_indices": [0]}, "b": {"item_indices": [0]}}),
        (ONE, {"a": {}, "b": {}}),
        (TWO, {"a": {"item_indices": [0]}, "b": {"item_indices": [0]}}),
        (TWO, {"a": {"item_indices": [0, 2]}}),
        (TWO, {"a": {}, "b": {}}),
        (TWO, {"a": {}}),
        (ONE, {"a": {"item_indices": [0], "modality": "video"}}),
        (ONE, {"a": {"item_indices": [0], "metadata": [1]}}),
        (ONE, {"a": [1]}),
        (ONE, {"ec_items": {"item_indices": [0]}}),
        (ONE, [1]),
        (VIDEO, {"v": {"item_indices": [0], "modality": "video"}}),
        (
            VIDEO,
            {
                "v": {"item_indices": [0], "modality": "video"},
                "a": {"item_indices": [0], "modality": "audio"},
            },
        ),
        (
            VIDEO,
            {
                "v": {"item_indices": [0], "modality": "video"},
                "a": {"item_indices": [1], "modality": "video"},
            },
        ),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(request_: Any, entries: Any) -> None:
    """Duplicate, foreign or ambiguous results are a protocol error, never a guess."""
    with pytest.raises(UpstreamProtocol):
        read_reply(request_, entries)


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b'{"ec_transfer_params": "x"}', b"\xff"])
def test_an_answer_that_is_no_encode_reply(body: bytes) -> None:
    """Whatever an encoder answers, the parser has an error for it."""
    with pytest.raises(UpstreamProtocol):
        read_encode_reply(body, ONE.items, uuids=uuids_for(ONE), transfer_ids=ids_for(ONE), is_pushed=True)
