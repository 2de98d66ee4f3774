"""Stop strings found in text that arrives in pieces."""

from __future__ import annotations

import random

import pytest

from epdctl.worker.language.stops import StopMatcher

pytestmark = pytest.mark.unit


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """Push pieces until a stop is found; return what came out, with the flush, and the stop."""
    out = []
    for piece in pieces:
        cut = matcher.push(piece)
        out.append(cut.text)
        if cut.stop is not None:
            return out, cut.stop
    return [*out, matcher.flush()], None


def test_a_beginning_of_a_stop_is_held_back() -> None:
    """Text that may become a stop string does not go out before that is decided."""
    assert feed(StopMatcher(["END"]), ["aE", "N", "x"]) == (["a", "", "ENx", ""], None)


def test_a_stop_over_several_pieces_is_cut_out() -> None:
    """A stop string that comes in three pieces never shows, nor does what is behind it."""
    assert feed(StopMatcher(["END"]), ["aE", "N", "Dzz"]) == (["a", "", ""], "END")


def test_keep_leaves_the_stop_at_the_end() -> None:
    """A request may ask for the stop string as part of the text."""
    assert feed(StopMatcher(["END"], keep=True), ["aEN", "Dzz"]) == (["a", "END"], "END")


def test_text_that_ends_gives_out_what_was_held() -> None:
    """An unfinished stop string at the end of the text is text."""
    assert feed(StopMatcher(["END"]), ["aEN"]) == (["a", "EN"], None)


def test_the_stop_that_is_complete_first_wins() -> None:
    """Of overlapping stop strings the one that is complete first cuts, whatever their order."""
    assert feed(StopMatcher(["abcd", "bc"]), ["xabcd"]) == (["xa"], "bc")


def test_without_stops_nothing_waits() -> None:
    """A request without stop strings gets its text at once."""
    assert feed(StopMatcher([]), ["a", "b"]) == (["a", "b", ""], None)


def test_pieces_never_change_the_outcome() -> None:
    """However a text is cut into pieces, the same text and the same stop come out."""
    draw = random.Random(3)
    for _ in range(3000):
        text = "".join(draw.choice("ab") for _ in range(draw.randint(0, 12)))
        stops = [
            "".join(draw.choice("ab") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(0, 2))
        ]
        whole = feed(StopMatcher(stops), list(text))
        pieces, rest = [], text
        while rest:
            cut = draw.randint(1, len(rest))
            pieces.append(rest[:cut])
            rest = rest[cut:]
        parts = feed(StopMatcher(stops), pieces)
        assert ("".join(whole[0]), whole[1]) == ("".join(parts[0]), parts[1])
        assert not any(stop in "".join(parts[0]) for stop in stops)
