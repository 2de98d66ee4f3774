"""What `scripts/make-tiny-model` does once its flags are read: progress goes to stderr, results to stdout."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import transformers

from models.tiny_vlm_recipe.architecture import Sizes
from models.tiny_vlm_recipe.batches import Collator
from models.tiny_vlm_recipe.checkpoint import digests, draw_random, load, save
from models.tiny_vlm_recipe.evaluation import Tally, evaluate
from models.tiny_vlm_recipe.recipes import RECIPES, shortfalls
from models.tiny_vlm_recipe.training import train

# With fewer, one wrong answer by bad luck already weighs more than the promise allows.
FEWEST_PER_TASK = 100


def write_trained(out: Path, *, architecture: str, seed: int) -> None:
    """Train a network and write its checkpoint. Raises ValueError for an architecture without a recipe."""
    if architecture not in RECIPES:
        raise ValueError(
            f"there is no training recipe for {architecture}: add --random, or name {list(RECIPES)}"
        )
    _prepare_torch()
    started = time.monotonic()
    trained = train(architecture, RECIPES[architecture], seed, _tell)
    _tell(f"trained in {time.monotonic() - started:.0f} s, {time.process_time():.0f} s of processor time")
    save(trained, out)
    _print_digests(out)


def write_random(
    out: Path, *, architecture: str, seed: int, sizes: Sizes, dtype: str, shard_bytes: int | None
) -> None:
    """Write a checkpoint with random weights."""
    _prepare_torch()
    random = draw_random(architecture, sizes, seed)
    everything = sum(parameter.numel() for parameter in random.network.parameters())
    tower = sum(parameter.numel() for parameter in random.network.model.visual.parameters())
    _tell(f"{everything:,} parameters, {100 * tower / everything:.1f} % of them in the vision tower")
    save(random, out, dtype=dtype, shard_bytes=shard_bytes)
    _print_digests(out)


def check(folder: Path, *, per_task: int) -> int:
    """Evaluate a checkpoint; return 1 if it falls short of what is promised, else 0.

    Raises ValueError for a folder without a checkpoint, and for too few questions to tell anything.
    """
    if per_task < FEWEST_PER_TASK:
        raise ValueError(f"--per-task is {per_task}: it must be at least {FEWEST_PER_TASK}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no checkpoint: there is no config.json in it")
    _prepare_torch()
    loaded = load(folder)
    collator = Collator(tokenizer=loaded.tokenizer, image_processor=loaded.image_processor)
    _tell(f"asking {folder} {per_task} questions a task")
    tallies = evaluate(loaded.network, collator, per_task)
    for way, tally in tallies.items():
        print(_line(way, tally))
    short = shortfalls(tallies)
    for problem in short:
        _tell(problem)
    return 1 if short else 0


def _line(way: str, tally: Tally) -> str:
    shares = (f"{task} {100 * share:.1f} %" for task, share in tally.shares().items())
    return f"{way:9}{'  '.join(shares)}"


def _print_digests(folder: Path) -> None:
    for name, digest in digests(folder).items():
        print(f"{digest}  {folder / name}")


def _prepare_torch() -> None:
    """One thread: with more, waiting threads cost more than they bring at this size."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
