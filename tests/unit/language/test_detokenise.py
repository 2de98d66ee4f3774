"""Tokens to text when characters are spread over tokens."""

from __future__ import annotations

import random

import pytest

from epdctl.worker.language.detokenise import Detokeniser, byte_level_alphabet

pytestmark = pytest.mark.unit


def by_byte(token: int) -> bytes:
    """Return the byte a token of a byte vocabulary stands for."""
    return bytes([token])


def test_a_character_comes_out_with_its_last_byte() -> None:
    """Nothing of a character shows before it is whole."""
    detokeniser = Detokeniser(by_byte)

    assert [detokeniser.push(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]


def test_half_a_character_at_the_end_is_a_replacement() -> None:
    """A text cut inside a character ends with the replacement character, as decoding it whole would."""
    detokeniser = Detokeniser(by_byte)
    pieces = [detokeniser.push(byte) for byte in "a€".encode()[:-1]]

    assert "".join(pieces) + detokeniser.flush() == "a\ufffd"


def test_pieces_joined_equal_the_whole() -> None:
    """For any bytes, valid or not, the pieces joined are what decoding all of them gives."""
    draw = random.Random(1)
    for _ in range(500):
        data = draw.randbytes(20) + "日本語🙂".encode()[: draw.randint(0, 13)]
        detokeniser = Detokeniser(by_byte)
        text = "".join(detokeniser.push(byte) for byte in data) + detokeniser.flush()
        assert text == data.decode(errors="replace")


def test_the_alphabet_has_a_character_for_every_byte() -> None:
    """Every byte has one character, printable ASCII stands for itself and a space is Ġ."""
    alphabet = byte_level_alphabet()

    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["a"], alphabet["Ġ"], alphabet["Ċ"]) == (97, 32, 10)
