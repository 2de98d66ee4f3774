"""What a choice makes of the engine's tokens."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.worker.language.choice import Choice, TextRules
from epdctl.worker.language.messages import Token

pytestmark = pytest.mark.unit

EOS = 300


def rules(**rest: Any) -> TextRules:
    """Return rules over a byte vocabulary whose token 300 is special."""
    return TextRules(
        token_bytes=lambda i: b"<end>" if i == EOS else bytes([i]), is_special=lambda i: i == EOS, **rest
    )


def say(choice: Choice, text: str, finish: str | None = None) -> list[str]:
    """Feed a text byte by byte; `finish` goes with the last one. Return the deltas' texts until it ends."""
    out = []
    data = text.encode()
    for i, byte in enumerate(data):
        last = finish if i == len(data) - 1 else None
        delta = choice.take(Token(0, byte, last))
        out.append(delta.text)
        if delta.finish is not None:
            break
    return out


def test_the_end_token_is_no_text() -> None:
    """An end token finishes the choice and adds nothing to its text."""
    choice = Choice(rules())
    say(choice, "red")
    delta = choice.take(Token(0, EOS, "stop"))

    assert (choice.text, delta.text, delta.finish, delta.stop_reason) == ("red", "", "stop", None)


def test_a_stop_string_ends_a_choice() -> None:
    """A stop string finishes with `stop`, is named as the reason, and its tokens still count."""
    choice = Choice(rules(stops=["the5"]))
    say(choice, "ab the5 more")

    assert (choice.text, choice.finish, choice.stop_reason, len(choice.tokens)) == ("ab ", "stop", "the5", 7)


def test_a_partial_stop_at_the_length_limit_is_text() -> None:
    """When the tokens run out inside a stop string, what was held back is given out."""
    choice = Choice(rules(stops=["the5"]))
    out = say(choice, "ab the", "length")

    assert (out, choice.finish) == (["a", "b", " ", "", "", "the"], "length")


def test_half_a_character_at_the_length_limit_shows_as_replacement() -> None:
    """The rest of a cut character comes with the last delta."""
    choice = Choice(rules())
    choice.take(Token(0, "€".encode()[0]))
    delta = choice.take(Token(0, "€".encode()[1], "length"))

    assert delta.text == "\ufffd"


def test_stops_count_from_min_tokens_on() -> None:
    """A stop string within the first min_tokens tokens is text."""
    choice = Choice(rules(stops=["ab"], min_tokens=3))
    say(choice, "abcab", None)

    assert (choice.text, choice.stop_reason) == ("abc", "ab")


def test_the_last_of_min_tokens_is_not_the_stop_yet() -> None:
    """A stop string that is complete with the last of min_tokens tokens is text, the next one is not."""
    choice = Choice(rules(stops=["c"], min_tokens=3))
    say(choice, "abcdc", None)

    assert (choice.text, choice.stop_reason) == ("abcd", "c")


def test_a_requested_stop_token_is_named() -> None:
    """A token of stop_token_ids is the stop reason; one of the model's own end tokens is not."""
    choice = Choice(rules(stop_token_ids=frozenset({120})))
    delta = choice.take(Token(0, 120, "stop"))

    assert (delta.text, delta.stop_reason) == ("", 120)


def test_special_tokens_show_only_on_request() -> None:
    """A special token inside the text is left out unless the request wants it."""
    hidden, shown = Choice(rules()), Choice(rules(keep_special=True))

    assert (hidden.take(Token(0, EOS)).text, shown.take(Token(0, EOS)).text) == ("", "<end>")
