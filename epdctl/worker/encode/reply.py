"""Builds the answer of an encode request, field for field as vLLM 0.33.0's encoder gives it.

Rules of this file: typed values in, plain JSON values out; the clock and the id are handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epdctl.domain import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedItem:
    """One encoded item: its name on the wire, its embedding rows, what is told of it, its delivery."""

    index: int
    mm_hash: str
    rows: int
    metadata: Mapping[str, Any]
    transfer_id: str | None
    modality: Modality = Modality.IMAGE


def build_transfer_params(items: Sequence[EncodedItem]) -> dict[str, Any]:
    """Return the `ec_transfer_params` of a reply.

    One entry per identifier, which lists every position it occurs at; of several transfer ids the last one is
    shown, as vLLM does.
    """
    entries: dict[str, Any] = {}
    for item in items:
        entry = entries.setdefault(item.mm_hash, {"modality": item.modality.value, "item_indices": []})
        entry["item_indices"].append(item.index)
        entry["metadata"] = dict(item.metadata)
        if item.transfer_id is not None:
            entry["transfer_id"] = item.transfer_id
    return entries


def build_reply(items: Sequence[EncodedItem], *, request_id: str, model: str, created: int) -> dict[str, Any]:
    """Return the chat completion that answers an encode request.

    `prompt_tokens` counts the placeholders of the media, which is all that an encode worker reads.
    """
    message = {"role": "assistant", "content": "", "refusal": None, "annotations": None, "audio": None}
    message |= {"function_call": None, "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    tokens = sum(item.rows for item in items)
    return {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice | {"token_ids": None}],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "ec_transfer_params": build_transfer_params(items) or None,
    }
