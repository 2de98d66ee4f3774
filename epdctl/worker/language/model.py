"""The language half of a checkpoint on transformers: load it alone, and run packed steps through it.

Rules of this file:
- The vision tower is never built and none of its weights are read.
- A step is one row of tokens of several sequences; each attends to its own KV only. transformers sees a batch
  of one without a cache: positions are passed explicitly and the attention function below keeps the KV, so no
  state of any request lives on the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epdctl.worker.language.checkpoint import HEAD, Checkpoint, UnsupportedCheckpoint, language_tensors
from epdctl.worker.language.kv import KvRegion

ATTENTION = "epdctl_segments"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSegment:
    """Rows `[row, row + count)` of a step are tokens `[start, start + count)` of the owner of `kv`."""

    row: int
    count: int
    start: int
    kv: KvRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class Visual:
    """Pushed rows that replace a step's rows `[row, row + len)`: `[len, hidden * (1 + levels)]`."""

    row: int
    embedding: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """One forward: `token_ids` `[rows]`, `positions` `[3, rows]` (int64), and which rows want logits."""

    token_ids: Tensor
    positions: Tensor
    segments: Sequence[PackedSegment]
    visuals: Sequence[Visual]
    logit_rows: Sequence[int]


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[PackedSegment],
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend segment by segment, each to its own KV, after adding its new tokens to it.

    Called by transformers' attention layers with `[1, heads, rows, dim]` tensors; a single sequence goes
    through transformers' own `sdpa` function exactly as it would without us.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer: int = module.layer_idx  # type: ignore[assignment]
    outputs = []
    for segment in segments:
        rows = slice(segment.row, segment.row + segment.count)
        end = segment.start + segment.count
        keys, values = segment.kv.keys[layer], segment.kv.values[layer]
        keys[segment.start : end] = key[0, :, rows].transpose(0, 1)
        values[segment.start : end] = value[0, :, rows].transpose(0, 1)
        output, _weights = sdpa_attention_forward(
            module,
            query[:, :, rows],
            keys[:end].transpose(0, 1).unsqueeze(0),
            values[:end].transpose(0, 1).unsqueeze(0),
            _mask(segment, query.device),
            scaling=scaling,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _mask(segment: PackedSegment, device: torch.device) -> Tensor | None:
    """Return which keys a later chunk of a prompt sees; sdpa knows the two other cases without a mask."""
    if segment.start == 0 or segment.count == 1:
        return None
    end = segment.start + segment.count
    positions = torch.arange(end, device=device)
    return (positions[None, :] <= positions[segment.start :, None])[None, None]


class LanguageModel:
    """Embedding table, text model and head; nothing else of the checkpoint."""

    def __init__(self, text: nn.Module, head: Tensor, levels: int) -> None:
        self._text = text
        self._head = head
        self._levels = levels
        self._table: nn.Embedding = text.get_input_embeddings()  # type: ignore[operator]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._head.device

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self._head.shape[1]

    def parameter_names(self) -> list[str]:
        """Return the names of all parameters held."""
        return [*(name for name, _ in self._text.named_parameters()), HEAD]

    @torch.inference_mode()
    def forward(self, step: PackedStep) -> Tensor:
        """Run one step and return float32 logits `[len(logit_rows), vocab]`."""
        inputs = self._table(step.token_ids)
        deepstack = self._insert(step.visuals, inputs)
        hidden = self._text(
            inputs_embeds=inputs.unsqueeze(0),
            position_ids=step.positions.unsqueeze(1),
            use_cache=False,
            segments=step.segments,
            **deepstack,
        ).last_hidden_state[0]
        rows = torch.tensor(step.logit_rows, dtype=torch.long, device=hidden.device)
        return nn.functional.linear(hidden[rows], self._head).float()

    def _insert(self, visuals: Sequence[Visual], inputs: Tensor) -> dict[str, Any]:
        """Write pushed rows over `inputs` and return what the deepstack layers need beside them."""
        if not visuals:
            return {}
        hidden = inputs.shape[1]
        mask = torch.zeros(inputs.shape[0], dtype=torch.bool, device=inputs.device)
        for visual in visuals:
            end = visual.row + visual.embedding.shape[0]
            inputs[visual.row : end] = visual.embedding[:, :hidden].to(inputs)
            mask[visual.row : end] = True
        if not self._levels:
            return {}
        rows = torch.cat([visual.embedding.to(inputs) for visual in visuals])
        levels = [rows[:, hidden * i : hidden * (i + 1)] for i in range(1, self._levels + 1)]
        return {"visual_pos_masks": mask.unsqueeze(0), "deepstack_visual_embeds": levels}


def load_language_model(checkpoint: Checkpoint, device: torch.device) -> LanguageModel:
    """Read the language model's tensors, and only those, in the spec's dtype onto `device`.

    On a CPU a tensor that has the right dtype already stays a view of the mapped file.

    Raises:
        UnsupportedCheckpoint: a tensor is missing or has another shape than the configuration says.
    """
    from accelerate import init_empty_weights
    from transformers import AttentionInterface, AutoModel

    spec, config = checkpoint.spec, checkpoint.config.get_text_config()
    dtype: torch.dtype = getattr(torch, spec.dtype)
    AttentionInterface.register(ATTENTION, segment_attention)
    with init_empty_weights(include_buffers=False):  # rotary frequencies are buffers that no file holds
        text = AutoModel.from_config(config, dtype=dtype)
    text.config._attn_implementation = ATTENTION
    state = _read(checkpoint, dtype, device)
    head = state.pop(HEAD, None)
    try:
        text.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise UnsupportedCheckpoint(
            f"{checkpoint.folder.name}: its tensors do not fit its config.json"
        ) from error
    text = text.to(device).eval().requires_grad_(False)
    if head is None:
        if not getattr(checkpoint.config, "tie_word_embeddings", False):
            raise UnsupportedCheckpoint(f"{checkpoint.folder.name}: {HEAD} is missing and not tied")
        head = text.get_input_embeddings().weight
    return LanguageModel(text, head, spec.levels)


def _read(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    from safetensors import safe_open

    state: dict[str, Tensor] = {}
    for path, names in language_tensors(checkpoint.folder).items():
        with safe_open(path, "pt") as file:
            for key, name in names.items():
                state[name] = file.get_tensor(key).to(device=device, dtype=dtype)
    return state
