"""How long an answer may become whose request does not say."""

from __future__ import annotations

import pytest

from epdctl.worker.language.params import AnswerRoom

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize(
    ("default", "kv_tokens", "choices", "minimum", "most"),
    [
        (None, 10_000, 1, 0, 900),  # the context ends first
        (None, 500, 1, 0, 400),  # the KV memory ends first
        (None, 500, 2, 0, 150),  # each choice has its own
        (None, 150, 2, 0, 1),  # too little for the prompt: the batch says so
        (64, 10_000, 1, 0, 64),
        (64, 120, 1, 0, 20),
        (64, 10_000, 1, 80, 80),  # min_tokens of the request are more than the default
        (2_000, 10_000, 1, 0, 900),
    ],
)
def test_an_answer_has_the_default_or_what_fits(
    default: int | None, kv_tokens: int, choices: int, minimum: int, most: int
) -> None:
    """With 100 prompt tokens and 900 left of the context, an answer never needs more KV than there is."""
    room = AnswerRoom(default=default, kv_tokens=kv_tokens)

    assert room.most(prompt=100, left=900, choices=choices, minimum=minimum) == most
