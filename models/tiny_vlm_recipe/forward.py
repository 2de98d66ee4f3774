"""A forward call of the whole network, cut where serving cuts it: between tower and language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from models.tiny_vlm_recipe.batches import UNLABELLED, Batch

Rows = tuple[torch.Tensor, ...]


def see(network: Any, batch: Batch) -> Any:
    """Return what the tower makes of the pictures, as transformers hands it on; None without pictures.

    `pooler_output` holds rows [tokens, width] a picture, `deepstack_features` (Qwen3-VL) the same a level.
    """
    if batch.pixels is None:
        return None
    return network.model.get_image_features(batch.pixels.values, batch.pixels.grids)


def with_rows(features: Any, change: Callable[[Rows], Rows]) -> Any:
    """Return the features with each tuple of rows, deepstack levels included, replaced by `change` of it."""
    changed: dict[str, Any] = {"pooler_output": change(tuple(features.pooler_output))}
    levels = getattr(features, "deepstack_features", None)
    if levels is not None:
        changed["deepstack_features"] = [change(tuple(level)) for level in levels]
    return type(features)(**{**features, **changed})


def answer_logits(network: Any, batch: Batch, features: Any) -> torch.Tensor:
    """Return logits [rows, length, vocabulary]; those at position n are about the token at n + 1."""
    seen = {} if features is None else {"mm_encoder_outputs": {"image": features}}
    hidden = network.model(**batch.inputs(), **seen, use_cache=False).last_hidden_state
    logits: torch.Tensor = network.lm_head(hidden)
    return logits


def answered_right(network: Any, batch: Batch, features: Any) -> list[bool]:
    """Tell for each row whether greedy decoding gives exactly the labelled answer and then ends.

    It does so if and only if each labelled token is the most likely one after the labelled tokens before it,
    so one forward call answers for all rows.
    """
    logits = answer_logits(network, batch, features)[:, :-1]
    labels = batch.labels[:, 1:]
    return [bool(row) for row in ((logits.argmax(-1) == labels) | (labels == UNLABELLED)).all(dim=1)]
