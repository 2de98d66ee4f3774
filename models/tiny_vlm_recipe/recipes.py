"""How each architecture is trained, and what is promised of it: the limits of `make-tiny-model --check`.

The model card has the numbers that were measured.
"""

from __future__ import annotations

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
# Blind guessing: 1 of 12 colours, 1 of 144, 1 of 1728, and the commonest of 4 figures; then room for luck.
MOST_GUESSED = MappingProxyType({"colour": 0.2, "two_colours": 0.08, "three_colours": 0.04, "figure": 0.45})


def shortfalls(tallies: Mapping[str, Tally]) -> list[str]:
    """Return one sentence for each promise that these answers do not keep."""
    wrong = [
        f"{way} {task}: {share:.3f} right, at least {LEAST_RIGHT} promised"
        for way in ("plain", "reversed")
        for task, share in tallies[way].shares().items()
        if share < LEAST_RIGHT
    ]
    guessed = [
        f"{way} {task}: {share:.3f} right, at most {MOST_GUESSED[task]} expected without the embeddings"
        for way in ("zeroed", "shuffled")
        for task, share in tallies[way].shares().items()
        if share > MOST_GUESSED[task]
    ]
    return wrong + guessed
