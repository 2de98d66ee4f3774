"""Training in two stages: the tower alone under throw-away heads, then the language model reading from it.

A tower that must learn colours through an untrained language model takes several times as many steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from models.tiny_vlm_recipe.architecture import Sizes, build_config, build_image_processor, build_network
from models.tiny_vlm_recipe.batches import UNLABELLED, Batch, Collator
from models.tiny_vlm_recipe.forward import answer_logits, see
from models.tiny_vlm_recipe.pictures import (
    COLOUR_NAMES,
    FIGURES,
    SEEDS_PER_RUN,
    TRAINING_SEEDS,
    Picture,
    draw_picture,
)
from models.tiny_vlm_recipe.questions import SampleStream
from models.tiny_vlm_recipe.tokenizer import build_tokenizer

LARGEST_SEED = 999
REPORT_EVERY = 50
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One run of the optimiser: warm up, then a cosine down to `last_share` of the rate."""

    steps: int
    batch: int
    rate: float
    warm_up: int
    last_share: float

    def rate_share(self, step: int) -> float:
        """Return the share of the rate that holds at this step."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / self.warm_up) * max(self.last_share, cosine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an architecture is trained.

    `shares` says how often each task is drawn in the language stage. With `tower_rests` the tower keeps there
    what it learned alone.
    """

    tower: Stage
    language: Stage
    tower_rests: bool
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A network and what reads its inputs."""

    network: Any
    tokenizer: Any
    image_processor: Any


def train(architecture: str, recipe: Recipe, seed: int, progress: Progress) -> Trained:
    """Train a network from scratch; the result depends on the arguments and the library versions alone.

    `progress` gets one line of text now and then. Raises ValueError for a seed outside 0..999.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed is {seed}: it must lie in 0..{LARGEST_SEED}")
    torch.use_deterministic_algorithms(True)
    first = TRAINING_SEEDS + seed * SEEDS_PER_RUN
    tokenizer, image_processor = build_tokenizer(), build_image_processor(architecture)
    network = build_network(build_config(architecture, tokenizer, Sizes()), seed)
    collator = Collator(tokenizer=tokenizer, image_processor=image_processor)
    teach_tower(network, collator, recipe.tower, first, progress)
    teach_language(network, collator, recipe, first + SEEDS_PER_RUN // 2, progress)
    return Trained(network=network.eval(), tokenizer=tokenizer, image_processor=image_processor)


class Probe(torch.nn.Module):
    """Throw-away linear heads: every merged token must tell the colour and the figure of its picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.colour = torch.nn.Linear(width, len(COLOUR_NAMES))
        self.figure = torch.nn.Linear(width, len(FIGURES))

    def loss(self, rows: torch.Tensor, colours: torch.Tensor, figures: torch.Tensor) -> torch.Tensor:
        """Return the loss of rows [tokens, width] against class numbers [tokens]."""
        return functional.cross_entropy(self.colour(rows), colours) + functional.cross_entropy(
            self.figure(rows), figures
        )

    @torch.no_grad()
    def accuracy(self, rows: torch.Tensor, colours: torch.Tensor, figures: torch.Tensor) -> str:
        """Return the share of tokens that tell the colour, and the figure, in words."""
        colour = (self.colour(rows).argmax(1) == colours).float().mean()
        figure = (self.figure(rows).argmax(1) == figures).float().mean()
        return f"colour {colour:.3f} figure {figure:.3f}"


def teach_tower(network: Any, collator: Collator, stage: Stage, first_seed: int, progress: Progress) -> None:
    """Train the tower alone, on pictures whose seeds count up from `first_seed`."""
    tower, seeds = network.model.visual, itertools.count(first_seed)
    probe = Probe(network.config.get_text_config().hidden_size)
    descent = Descent([*tower.parameters(), *probe.parameters()], stage)
    for _ in range(stage.steps):
        pictures = [draw_picture(next(seeds)) for _ in range(stage.batch)]
        pixels = collator.pixels(pictures)
        colours, figures = _probe_targets(pictures, collator.token_counts(pixels))
        seen = tower(pixels.values, pixels.grids)
        loss = probe.loss(seen.pooler_output, colours, figures)
        for level in getattr(seen, "deepstack_features", None) or []:
            loss = loss + 0.3 * probe.loss(level, colours, figures)
        descent.step(loss)
        if place := descent.report():
            accuracy = probe.accuracy(seen.pooler_output, colours, figures)
            progress(f"tower {place}: loss {loss.item():.3f}, {accuracy}")


def teach_language(
    network: Any, collator: Collator, recipe: Recipe, first_seed: int, progress: Progress
) -> None:
    """Train the network on answers about pictures whose seeds count up from `first_seed`."""
    stage, stream = recipe.language, SampleStream(first_seed, recipe.shares)
    learners = network.model.language_model if recipe.tower_rests else network
    descent = Descent(list(learners.parameters()), stage)
    for _ in range(stage.steps):
        batch = collator.collate([stream.draw() for _ in range(stage.batch)])
        with torch.set_grad_enabled(not recipe.tower_rests):
            features = see(network, batch)
        loss = answer_loss(network, batch, features)
        descent.step(loss)
        if place := descent.report():
            progress(f"language {place}: loss {loss.item():.4f}")


def answer_loss(network: Any, batch: Batch, features: Any) -> torch.Tensor:
    """Return the mean cross entropy over the tokens of the answers."""
    labels = batch.labels[:, 1:]
    asked = labels != UNLABELLED
    return functional.cross_entropy(answer_logits(network, batch, features)[:, :-1][asked], labels[asked])


class Descent:
    """AdamW over some parameters through the steps of one stage."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], stage: Stage) -> None:
        self._stage = stage
        self._parameters = parameters
        self._done = 0
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=stage.rate, betas=(0.9, 0.98))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimiser, stage.rate_share)

    def step(self, loss: torch.Tensor) -> None:
        """Take one step down this loss."""
        self._optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimiser.step()
        self._schedule.step()
        self._done += 1

    def report(self) -> str | None:
        """Return the place in the stage when it is time to tell it, else None."""
        is_due = self._done % REPORT_EVERY == 0 or self._done == self._stage.steps
        return f"{self._done}/{self._stage.steps}" if is_due else None


def _probe_targets(
    pictures: Sequence[Picture], token_counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.tensor(token_counts)
    colours = torch.tensor([COLOUR_NAMES.index(picture.colour) for picture in pictures])
    figures = torch.tensor([FIGURES.index(picture.figure) for picture in pictures])
    return colours.repeat_interleave(counts), figures.repeat_interleave(counts)
