"""What the tiny models are asked and what they must answer.

Rules of this file: no torch, no files, no clock; a sample follows from its stream's first picture seed and
its place in the stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from models.tiny_vlm_recipe.pictures import COLOUR_NAMES, FIGURES, Picture, draw_picture

SYSTEM_PROMPT = "You are a helpful assistant."
NO_IMAGE = "no image"
SEPARATOR = " then "

_NOUNS = ("image", "picture", "photo")
_SPELLINGS = ("color", "colour")
_ONE_COLOUR = (
    "What is the {colour} of the {noun}?",
    "What is the {colour} of this {noun}?",
    "What {colour} is the {noun}?",
    "What {colour} is this {noun}?",
    "What {colour} is this?",
    "What {colour} is it?",
    "What is the {colour}?",
    "Which {colour} is the {noun}?",
    "Which {colour} is it?",
    "Which {colour}?",
    "Name the {colour}.",
)
_EACH_COLOUR = (
    "What are the {colour}s?",
    "What are the {colour}s of the {noun}s?",
    "What {colour}s are the {noun}s?",
    "Which {colour}s?",
    "List the {colour}s.",
    "List the {colour}s of the {noun}s.",
    "List the {colour}s in order.",
    "Name the {colour}s.",
)
_FIGURE = (
    "What shape is in the {noun}?",
    "Which shape is in the {noun}?",
    "What shape is it?",
    "What is the shape?",
    "Which shape?",
)
COUNTS = (5, 10, 20)


def _wordings(templates: tuple[str, ...]) -> tuple[str, ...]:
    filled = (
        template.format(colour=spelling, noun=noun)
        for template, spelling, noun in itertools.product(templates, _SPELLINGS, _NOUNS)
    )
    return tuple(dict.fromkeys(filled))


COLOUR_QUESTIONS = _wordings(_ONE_COLOUR)
COLOURS_QUESTIONS = _wordings(_EACH_COLOUR)
FIGURE_QUESTIONS = _wordings(_FIGURE)
COUNT_QUESTIONS = MappingProxyType({f"Count to {last}.": last for last in COUNTS})
QUESTIONS = COLOUR_QUESTIONS + COLOURS_QUESTIONS + FIGURE_QUESTIONS + tuple(COUNT_QUESTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One user message and the right answer to it."""

    task: str
    pictures: tuple[Picture, ...]
    question: str
    answer: str
    question_first: bool = False

    def reversed(self) -> Sample:
        """Return the same message with its pictures, and so its answer, in the opposite order."""
        pictures = self.pictures[::-1]
        return Sample(
            task=self.task,
            pictures=pictures,
            question=self.question,
            answer=colours_answer(pictures),
            question_first=self.question_first,
        )


def colours_answer(pictures: tuple[Picture, ...]) -> str:
    """Return what the models must say about the colours of these pictures, in order."""
    return SEPARATOR.join(picture.colour for picture in pictures) or NO_IMAGE


def count_answer(last: int) -> str:
    """Return the numbers from 1 to `last` as the models must write them."""
    return " ".join(str(number) for number in range(1, last + 1))


def answers() -> Iterator[str]:
    """Yield texts that hold every word an answer is made of; the tokenizer learns from them."""
    yield NO_IMAGE
    yield from FIGURES
    yield count_answer(max(COUNTS))
    for colour in COLOUR_NAMES:
        yield colour
        yield f"{colour}{SEPARATOR}{colour}"


class SampleStream:
    """Endless samples in which no picture occurs twice.

    `shares` gives the tasks and how often each is drawn. Picture seeds count up from `first_seed`.
    """

    def __init__(self, first_seed: int, shares: Mapping[str, float]) -> None:
        self._rng = np.random.default_rng([first_seed, 1])
        self._seeds = itertools.count(first_seed)
        self._tasks = tuple(shares)
        self._shares = np.array(list(shares.values())) / sum(shares.values())

    def draw(self, task: str | None = None) -> Sample:
        """Return the next sample, of the given task or of one drawn by its share."""
        drawn = self._tasks[self._rng.choice(len(self._tasks), p=self._shares)]
        task = task or drawn
        if task == "count":
            question = self._pick(tuple(COUNT_QUESTIONS))
            answer = count_answer(COUNT_QUESTIONS[question])
            return Sample(task=task, pictures=(), question=question, answer=answer)
        if task == "no_image":
            question = self._pick(COLOUR_QUESTIONS + COLOURS_QUESTIONS + FIGURE_QUESTIONS)
            return Sample(task=task, pictures=(), question=question, answer=NO_IMAGE)
        return self._about_pictures(task)

    def _about_pictures(self, task: str) -> Sample:
        wordings = {"colour": COLOUR_QUESTIONS, "figure": FIGURE_QUESTIONS}.get(task, COLOURS_QUESTIONS)
        number = {"two_colours": 2, "three_colours": 3}.get(task, 1)
        pictures = tuple(draw_picture(next(self._seeds)) for _ in range(number))
        return Sample(
            task=task,
            pictures=pictures,
            question=self._pick(wordings),
            answer=pictures[0].figure if task == "figure" else colours_answer(pictures),
            question_first=bool(self._rng.random() < 0.25),
        )

    def _pick(self, wordings: tuple[str, ...]) -> str:
        return wordings[self._rng.integers(len(wordings))]
