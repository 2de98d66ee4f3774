"""How each architecture is trained, and what is promised of it: the limits of `make-tiny-model --check`.

The model card has the numbers that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from models.tiny_vlm_recipe.evaluation import Tally
from models.tiny_vlm_recipe.training import Recipe, Stage

SHARES = MappingProxyType(
    {
        "colour": 0.14,
        "two_colours": 0.26,
        "three_colours": 0.37,
        "figure": 0.13,
        "no_image": 0.04,
        "count": 0.06,
    }
)
RECIPES = MappingProxyType(
    {
        "qwen2_5_vl": Recipe(
            tower=Stage(steps=600, batch=40, rate=3e-3, warm_up=30, last_share=0.1),
            language=Stage(steps=900, batch=32, rate=3e-3, warm_up=60, last_share=0.02),
            tower_rests=True,
            shares=SHARES,
        ),
        "qwen3_vl": Recipe(
            tower=Stage(steps=800, batch=40, rate=3e-3, warm_up=30, last_share=0.1),
            language=Stage(steps=700, batch=32, rate=3e-3, warm_up=60, last_share=0.02),
            tower_rests=True,
            shares=SHARES,
        ),
    }
)

LEAST_RIGHT = 0.98
CHANCE = MappingProxyType(
    {"colour": 1 / 12, "two_colours": 1 / 144, "three_colours": 1 / 1728, "figure": 1 / 4}
)


def most_guessed(task: str, asked: int) -> float:
    """Return the largest share of right answers that guessing explains: chance, a little skill, and luck."""
    chance = CHANCE[task]
    return chance + 0.05 + 4 * math.sqrt(chance * (1 - chance) / asked)


def shortfalls(tallies: Mapping[str, Tally]) -> list[str]:
    """Return one sentence for each promise that these answers do not keep."""
    wrong = [
        f"{way} {task}: {share:.3f} right, at least {LEAST_RIGHT} promised"
        for way in ("plain", "reversed")
        for task, share in tallies[way].shares().items()
        if share < LEAST_RIGHT
    ]
    guessed = [
        f"{way} {task}: {share:.3f} right, at most {limit:.3f} expected without the embeddings"
        for way in ("zeroed", "shuffled")
        for task, share in tallies[way].shares().items()
        if share > (limit := most_guessed(task, tallies[way].asked[task]))
    ]
    return wrong + guessed
