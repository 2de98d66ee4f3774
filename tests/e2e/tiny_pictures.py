"""Questions about held-out pictures for the tiny checkpoints, in the shape of OpenAI chat messages.

Rules of this file: pictures come from seeds that no training and no measurement in the model card used
(`TEST_SEEDS` and up); no torch.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.tiny_vlm_recipe.pictures import COLOUR_NAMES, TEST_SEEDS, Picture, draw_picture
from models.tiny_vlm_recipe.questions import COUNT_QUESTIONS, colours_answer, count_answer

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-vlm"
QWEN2_5_VL = MODELS / "qwen2_5_vl"
QWEN3_VL = MODELS / "qwen3_vl"

COLOUR_QUESTION = "What is the color of the image?"
COLOURS_QUESTION = "What are the colors of the images?"
LONG_QUESTION = "Count to 20."
LONG_ANSWER = count_answer(COUNT_QUESTIONS[LONG_QUESTION])

Message = dict[str, Any]


def held_out_picture(number: int, colour: str | None = None) -> Picture:
    """Return held-out picture `number`, counted from 0, in the given colour or in one that its seed draws."""
    return draw_picture(TEST_SEEDS + number, colour=colour)


def held_out_pictures(count: int, first: int = 0) -> tuple[Picture, ...]:
    """Return `count` held-out pictures whose colours go round, so that all twelve come up equally often."""
    numbers = range(first, first + count)
    return tuple(held_out_picture(number, COLOUR_NAMES[number % len(COLOUR_NAMES)]) for number in numbers)


def png(picture: Picture) -> bytes:
    """Return the picture as a PNG file, which loses nothing."""
    packed = io.BytesIO()
    picture.image.save(packed, "PNG")
    return packed.getvalue()


def data_url(picture: Picture) -> str:
    """Return the picture as a `data:` URL."""
    return "data:image/png;base64," + base64.b64encode(png(picture)).decode()


def ask(pictures: Sequence[Picture], question: str | None = None) -> list[Message]:
    """Return the messages that ask for the colours of these pictures, or another question about them."""
    asked = question or (COLOUR_QUESTION if len(pictures) < 2 else COLOURS_QUESTION)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": asked}]}]


def expected_answer(pictures: Sequence[Picture]) -> str:
    """Return the right answer to `ask(pictures)`."""
    return colours_answer(tuple(pictures))


def text(question: str) -> list[Message]:
    """Return a conversation without pictures."""
    return [{"role": "user", "content": question}]


def mixed(count: int, *, first: int) -> list[tuple[list[Message], list[Picture]]]:
    """Return `count` conversations with their pictures: one and two pictures, text only, several turns.

    The pictures are held-out pictures from number `first`.
    """
    pictures = list(held_out_pictures(2 * count, first=first))
    made: list[tuple[list[Message], list[Picture]]] = []
    for i in range(count):
        two = pictures[2 * i : 2 * i + 2]
        said = {"role": "assistant", "content": "red"}
        kinds = [
            (ask(two[:1]), two[:1]),
            (ask(two), two),
            (text(LONG_QUESTION), []),
            ([*ask(two[:1]), said, *ask(two[1:])], two),
        ]
        made.append(kinds[i % 4])
    return made
