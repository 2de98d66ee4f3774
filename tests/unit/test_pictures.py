"""Synthetic pictures and the questions about them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from models.tiny_vlm_recipe.pictures import (
    COLOUR_NAMES,
    COLOURS,
    LONGEST_SIDE,
    SHORTEST_SIDE,
    TEST_SEEDS,
    Picture,
    draw_picture,
)
from models.tiny_vlm_recipe.questions import (
    COLOUR_QUESTIONS,
    COLOURS_QUESTIONS,
    COUNT_QUESTIONS,
    FIGURE_QUESTIONS,
    QUESTIONS,
    Sample,
    SampleStream,
    count_answer,
)

pytestmark = pytest.mark.unit

TASKS = ("colour", "two_colours", "three_colours", "figure", "no_image", "count")


def draw_samples(first_seed: int, count: int) -> list[Sample]:
    """Return the first samples of a stream in which every task is equally likely."""
    stream = SampleStream(first_seed, dict.fromkeys(TASKS, 1.0))
    return [stream.draw() for _ in range(count)]


def nearest_colour(picture: Picture) -> str:
    """Return the colour with the shade nearest to the upper left corner, which no figure covers."""
    corner = np.asarray(picture.image, dtype=float)[:4, :4].mean(axis=(0, 1))
    shares = np.linspace(0, 1, 11)[:, None]
    distances = {
        name: np.abs(corner - (np.array(muted) + shares * (np.array(pure) - muted))).sum(axis=1).min()
        for name, (muted, pure) in COLOURS.items()
    }
    return min(distances, key=lambda name: float(distances[name]))


def test_a_seed_is_a_picture() -> None:
    """The same seed gives the same bytes, and no two of a hundred seeds give the same picture."""
    seeds = range(TEST_SEEDS, TEST_SEEDS + 100)

    first = [draw_picture(seed).image.tobytes() for seed in seeds]

    assert first == [draw_picture(seed).image.tobytes() for seed in seeds]
    assert len(set(first)) == 100


@pytest.mark.parametrize("colour", COLOUR_NAMES)
def test_a_picture_shows_the_colour_it_names(colour: str) -> None:
    """Noise, JPEG and variation never bring a ground nearer to another of the twelve colours."""
    pictures = [draw_picture(TEST_SEEDS + number, colour=colour) for number in range(50)]

    assert {picture.colour for picture in pictures} == {colour}
    assert {nearest_colour(picture) for picture in pictures} == {colour}


def test_asking_for_a_colour_changes_nothing_else() -> None:
    """Size and figure of a seed do not depend on the colour that was asked for."""
    drawn = [draw_picture(seed) for seed in range(20)]
    red = [draw_picture(seed, colour="red") for seed in range(20)]

    assert [(one.image.size, one.figure) for one in drawn] == [(one.image.size, one.figure) for one in red]


def test_the_drawn_size_stays_in_its_bounds() -> None:
    """Both sides of a picture lie between the shortest and the longest side that training saw."""
    sides = [side for seed in range(300) for side in draw_picture(seed).image.size]

    assert min(sides) >= SHORTEST_SIDE
    assert max(sides) <= LONGEST_SIDE


def test_an_unknown_figure_is_refused_by_name() -> None:
    """A figure that cannot be drawn is an error that lists those that can."""
    with pytest.raises(ValueError, match=r"'hexagon': one of none, circle, square, triangle"):
        draw_picture(0, figure="hexagon")


def test_a_stream_is_reproducible_and_never_repeats_a_picture() -> None:
    """Streams from the same seed agree; within a stream the picture seeds count up without a gap."""
    samples = draw_samples(500, 200)

    assert [(one.task, one.question, one.answer) for one in samples] == [
        (one.task, one.question, one.answer) for one in draw_samples(500, 200)
    ]
    seeds = [picture.seed for sample in samples for picture in sample.pictures]
    assert seeds == list(itertools.islice(itertools.count(500), len(seeds)))


def test_answers_name_the_pictures_in_order() -> None:
    """About one or more pictures the answer is their colours, in the order in which they are given."""
    asked = [one for one in draw_samples(0, 300) if one.task in ("colour", "two_colours", "three_colours")]

    assert {len(one.pictures) for one in asked} == {1, 2, 3}
    assert [one.answer.split(" then ") for one in asked] == [
        [picture.colour for picture in one.pictures] for one in asked
    ]


def test_a_reversed_sample_wants_the_reversed_answer() -> None:
    """Pictures in the opposite order are answered in the opposite order, under the same question."""
    sample = SampleStream(7, {"three_colours": 1.0}).draw()

    turned = sample.reversed()

    assert turned.pictures == sample.pictures[::-1]
    assert turned.answer.split(" then ") == sample.answer.split(" then ")[::-1]
    assert turned.question == sample.question


def test_no_question_has_two_meanings() -> None:
    """A wording asks for one colour, several, a figure or a count, and never for two of these."""
    kinds = (COLOUR_QUESTIONS, COLOURS_QUESTIONS, FIGURE_QUESTIONS, tuple(COUNT_QUESTIONS))

    assert len(set(QUESTIONS)) == sum(len(kind) for kind in kinds) == len(QUESTIONS)


def test_counting_goes_from_one_to_the_number_asked_for() -> None:
    """A count answer holds every number once, up to the one in the question."""
    assert count_answer(5) == "1 2 3 4 5"
    assert {question: count_answer(last).split()[-1] for question, last in COUNT_QUESTIONS.items()} == {
        "Count to 5.": "5",
        "Count to 10.": "10",
        "Count to 20.": "20",
    }
