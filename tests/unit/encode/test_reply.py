"""The answer of an encode request against a recorded vLLM encoder."""

from __future__ import annotations

import pytest

from epdctl.worker.encode.reply import EncodedItem, build_reply, build_transfer_params

pytestmark = pytest.mark.unit


def item(index: int, mm_hash: str, transfer_id: str | None = None) -> EncodedItem:
    """Return an encoded picture of 8 x 8 patches."""
    metadata = {"image_grid_thw": [1, 8, 8]}
    return EncodedItem(index=index, mm_hash=mm_hash, rows=16, metadata=metadata, transfer_id=transfer_id)


def test_identical_pictures_share_an_entry_that_lists_both_places() -> None:
    """As vLLM answers it: one entry, every position, the last transfer id."""
    params = build_transfer_params([item(0, "h", "t0"), item(1, "h", "t1"), item(2, "g", "t2")])

    assert params == {
        "h": {
            "modality": "image",
            "item_indices": [0, 1],
            "metadata": {"image_grid_thw": [1, 8, 8]},
            "transfer_id": "t1",
        },
        "g": {
            "modality": "image",
            "item_indices": [2],
            "metadata": {"image_grid_thw": [1, 8, 8]},
            "transfer_id": "t2",
        },
    }


def test_reply_has_the_fields_of_a_vllm_encoder() -> None:
    """The answer is a chat completion with the same top-level fields and values."""
    reply = build_reply([item(0, "h", "t0")], request_id="r", model="m", created=5)

    assert (reply["id"], reply["object"], reply["created"], reply["model"]) == (
        "chatcmpl-r",
        "chat.completion",
        5,
        "m",
    )
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["message"]["role"], choice["message"]["content"]) == (
        "stop",
        "assistant",
        "",
    )
    counts = {name: value for name, value in reply["usage"].items() if value is not None}
    assert counts == {"prompt_tokens": 16, "total_tokens": 16, "completion_tokens": 0}


def test_item_without_a_transfer_names_none() -> None:
    """Where nothing is pushed no transfer id is shown, and without pictures there are no parameters."""
    assert "transfer_id" not in build_transfer_params([item(0, "h")])["h"]
    assert build_reply([], request_id="r", model="m", created=5)["ec_transfer_params"] is None
