"""Our answer beside a recorded vLLM encoder's, for the same recorded requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epdctl.worker.encode.keys import transfer_id_of
from epdctl.worker.encode.reply import EncodedItem, build_reply
from epdctl.worker.encode.request import EncodeRequest, parse_encode_request

pytestmark = pytest.mark.unit

CAPTURES = sorted((Path(__file__).parent / "captures").glob("*.json"))
NOT_OURS = {"prompt_token_ids", "prompt_text", "metrics"}
"""Fields that vLLM sends as null in every answer of an encoder, and nobody reads."""


def answer(request: EncodeRequest, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return our answer to `request`, with the grids that the recorded one names."""
    params = recorded["ec_transfer_params"]
    items = []
    for part in request.parts:
        name = part.uuid or ""
        metadata = params[name]["metadata"]
        time, height, width = metadata["image_grid_thw"]
        items.append(
            EncodedItem(
                index=part.index,
                mm_hash=name,
                rows=time * height * width // 4,
                metadata=metadata,
                transfer_id=transfer_id_of(part.index, name, request.named, "own"),
            )
        )
    request_id = recorded["id"].removeprefix("chatcmpl-")
    return build_reply(items, request_id=request_id, model=recorded["model"], created=recorded["created"])


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_answer_equals_the_recorded_one(path: Path) -> None:
    """Every field that anybody reads has the recorded name and value; `modality` is what vLLM 0.33 adds."""
    capture = json.loads(path.read_bytes())
    recorded = capture["response"]

    ours = answer(parse_encode_request(capture["request"], model="tiny-vl", max_items=8), recorded)

    for entry in ours["ec_transfer_params"].values():
        assert entry.pop("modality") == "image"
    assert ours["ec_transfer_params"] == recorded["ec_transfer_params"]
    assert set(recorded) - set(ours) == NOT_OURS
    for name in ("id", "object", "created", "model", "service_tier", "prompt_logprobs", "kv_transfer_params"):
        assert ours[name] == recorded[name]
    assert ours["choices"][0]["message"] == recorded["choices"][0]["message"]
    assert ours["choices"][0]["finish_reason"] == recorded["choices"][0]["finish_reason"]
    # vLLM's prompt is the whole rendered chat: 15 tokens of this model's template, and two around each image.
    around = 15 + 2 * len(capture["request"]["messages"][0]["content"])
    for name in ("prompt_tokens", "total_tokens"):
        assert ours["usage"].pop(name) + around == recorded["usage"].pop(name)
    assert ours["usage"] == recorded["usage"]
