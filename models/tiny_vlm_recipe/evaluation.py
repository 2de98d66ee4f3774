"""How good a network is on pictures no training used, and that it is the embeddings it reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from models.tiny_vlm_recipe.batches import Collator
from models.tiny_vlm_recipe.forward import Rows, answered_right, see, with_rows
from models.tiny_vlm_recipe.pictures import CHECK_SEEDS
from models.tiny_vlm_recipe.questions import Sample, SampleStream

LANES = 24
PICTURE_TASKS = ("colour", "two_colours", "three_colours", "figure")
TEXT_TASKS = ("no_image", "count")
ORDER_TASKS = ("two_colours", "three_colours")


@dataclass(slots=True)
class Tally:
    """Right answers and all answers, by task."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def add(self, task: str, outcomes: list[bool]) -> None:
        """Count these answers."""
        self.right[task] += sum(outcomes)
        self.asked[task] += len(outcomes)

    def shares(self) -> dict[str, float]:
        """Return the share of right answers by task."""
        return {task: self.right[task] / asked for task, asked in self.asked.items()}


@torch.no_grad()
def evaluate(network: Any, collator: Collator, per_task: int) -> dict[str, Tally]:
    """Ask `per_task` held-out questions of every task.

    `plain` is as served; `reversed` gives the pictures in the opposite order and wants the opposite answer;
    `zeroed` has zeros for embeddings and `shuffled` those of other pictures.
    """
    tallies = {name: Tally() for name in ("plain", "reversed", "zeroed", "shuffled")}
    stream = SampleStream(CHECK_SEEDS, dict.fromkeys(PICTURE_TASKS, 1.0))
    for task in PICTURE_TASKS + TEXT_TASKS:
        for start in range(0, per_task, LANES):
            samples = [stream.draw(task) for _ in range(min(LANES, per_task - start))]
            _ask(network, collator, task, samples, tallies)
    return tallies


def _ask(
    network: Any, collator: Collator, task: str, samples: list[Sample], tallies: dict[str, Tally]
) -> None:
    batch = collator.collate(samples)
    features = see(network, batch)
    tallies["plain"].add(task, answered_right(network, batch, features))
    if features is None:
        return
    tallies["zeroed"].add(task, answered_right(network, batch, with_rows(features, zeroed)))
    tallies["shuffled"].add(task, answered_right(network, batch, with_rows(features, shuffled)))
    if task in ORDER_TASKS:
        turned = collator.collate([sample.reversed() for sample in samples])
        tallies["reversed"].add(task, answered_right(network, turned, see(network, turned)))


def zeroed(rows: Rows) -> Rows:
    """Return zeros of the same shapes."""
    return tuple(torch.zeros_like(row) for row in rows)


def shuffled(rows: Rows) -> Rows:
    """Return for each picture the rows of one half a batch away, repeated or cut to its number of tokens."""
    away = len(rows) // 2
    donors = rows[away:] + rows[:away]
    return tuple(_fitted(donor, len(row)) for row, donor in zip(rows, donors, strict=True))


def _fitted(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows.repeat(-(-count // len(rows)), 1)[:count]
