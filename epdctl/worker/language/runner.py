"""Runs a planned step on the model; all of it happens on the engine's one compute thread.

Rules of this file: it knows the tensors of the running requests and nothing of queues, sockets or time. A
step that failed may be run again: KV is written at fixed places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epdctl.worker.language.batch import Key, Plan, Segment
from epdctl.worker.language.kv import KvRegion, copy_prefix
from epdctl.worker.language.model import LanguageModel, PackedSegment, PackedStep, Visual
from epdctl.worker.language.positions import Positions
from epdctl.worker.language.sampling import Chosen, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEmbedding:
    """Pushed rows and the prompt position of the first of them; the rows stay with their owner."""

    offset: int
    rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model reads of a request: ids `[length]`, positions `[3, length]`, pushed embeddings."""

    token_ids: Tensor
    positions: Tensor
    delta: int
    embeddings: tuple[PlacedEmbedding, ...]


@dataclass(slots=True, kw_only=True)
class _Live:
    prompt: Prompt
    sampler: Sampler
    last: dict[int, int] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)


def build_prompt(
    token_ids: Sequence[int],
    positions: Positions,
    embeddings: Sequence[PlacedEmbedding],
    device: torch.device,
) -> Prompt:
    """Return the tensors of a prompt on `device`; embeddings are taken as they are."""
    axes = [positions.time, positions.height, positions.width]
    return Prompt(
        token_ids=torch.tensor(token_ids, dtype=torch.long, device=device),
        positions=torch.tensor(axes, dtype=torch.long, device=device),
        delta=positions.delta,
        embeddings=tuple(embeddings),
    )


class Runner:
    """The running requests' tensors, and the model."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._live: dict[str, _Live] = {}

    def add(self, request_id: str, prompt: Prompt, sampler: Sampler) -> None:
        """Take up a request; it stays until `remove`."""
        self._live[request_id] = _Live(prompt=prompt, sampler=sampler)

    def remove(self, request_id: str) -> None:
        """Forget a request and let go of its embeddings."""
        self._live.pop(request_id, None)

    def run(self, plan: Plan[KvRegion]) -> dict[Key, Chosen]:
        """Compute the step and return the chosen token of every sequence that samples in it."""
        logits = self._model.forward(self._pack(plan))
        chosen: dict[Key, Chosen] = {}
        sampling = [segment for segment in plan.segments if segment.samples]
        best = logits.argmax(dim=-1).tolist()
        for row, segment in enumerate(sampling):
            for key in segment.samples:
                chosen[key] = self._choose(key, logits[row], best[row])
                if key != segment.key:
                    copy_prefix(plan.regions[segment.key], plan.regions[key], segment.start + segment.count)
        for key, choice in chosen.items():
            live = self._live[key.request_id]
            live.last[key.index] = choice.token
            live.generated[key.index] = live.generated.get(key.index, 0) + 1
        return chosen

    def _choose(self, key: Key, logits: Tensor, best: int) -> Chosen:
        live = self._live[key.request_id]
        if live.sampler.is_plain:
            return Chosen(token=best)
        return live.sampler.choose(logits, choice=key.index, position=live.generated.get(key.index, 0))

    def _pack(self, plan: Plan[KvRegion]) -> PackedStep:
        ids: list[Tensor] = []
        positions: list[Tensor] = []
        packed: list[PackedSegment] = []
        visuals: list[Visual] = []
        logit_rows: list[int] = []
        row = 0
        for segment in plan.segments:
            segment_ids, segment_positions = self._rows(segment)
            ids.append(segment_ids)
            positions.append(segment_positions)
            kv = plan.regions[segment.key]
            packed.append(PackedSegment(row=row, count=segment.count, start=segment.start, kv=kv))
            visuals.extend(_visuals(self._live[segment.key.request_id].prompt, segment, row))
            row += segment.count
            if segment.samples:
                logit_rows.append(row - 1)
        return PackedStep(
            token_ids=torch.cat(ids),
            positions=torch.cat(positions, dim=1),
            segments=packed,
            visuals=visuals,
            logit_rows=logit_rows,
        )

    def _rows(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """Return a segment's ids `[count]` and positions `[3, count]`."""
        live = self._live[segment.key.request_id]
        prompt, end = live.prompt, segment.start + segment.count
        if segment.start < prompt.token_ids.shape[0]:
            return prompt.token_ids[segment.start : end], prompt.positions[:, segment.start : end]
        device = prompt.token_ids.device
        last = torch.tensor([live.last[segment.key.index]], dtype=torch.long, device=device)
        position = torch.full((3, 1), segment.start + prompt.delta, dtype=torch.long, device=device)
        return last, position


def _visuals(prompt: Prompt, segment: Segment, row: int) -> list[Visual]:
    """Return the parts of the prompt's embeddings that fall into `segment`, which starts at `row`."""
    end = segment.start + segment.count
    visuals = []
    for embedding in prompt.embeddings:
        first = max(embedding.offset, segment.start)
        behind = min(embedding.offset + embedding.rows.shape[0], end)
        if first < behind:
            rows = embedding.rows[first - embedding.offset : behind - embedding.offset]
            visuals.append(Visual(row=row + first - segment.start, embedding=rows))
    return visuals


def requests_of(plan: Plan[KvRegion]) -> Mapping[str, Plan[KvRegion]]:
    """Return one plan per request of `plan`, to find out which of them makes a step fail."""
    parts: dict[str, list[Segment]] = {}
    for segment in plan.segments:
        parts.setdefault(segment.key.request_id, []).append(segment)
    return {
        request_id: Plan(segments=tuple(segments), imports={}, regions=plan.regions)
        for request_id, segments in parts.items()
    }
