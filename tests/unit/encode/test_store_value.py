"""What counts as a value of the shared store."""

from __future__ import annotations

import pytest
from blake3 import blake3

from epdctl.worker.encode.store_value import parse_value
from tests.unit.encode.store_values import FACTS, ROWS, value_of

pytestmark = pytest.mark.unit


class TestValues:
    """What counts as a value."""

    def test_a_value_gives_facts_and_rows_back(self) -> None:
        """What was written is what is read, and the rows begin at a multiple of 64 bytes."""
        value = value_of("k")

        parsed = parse_value("k", memoryview(value))

        assert parsed is not None
        facts, rows = parsed
        assert (facts, bytes(rows)) == (FACTS, ROWS)
        assert (len(value) - len(ROWS)) % 64 == 0

    def test_any_changed_byte_makes_it_no_value(self) -> None:
        """Whichever byte of a value is another one, in header or rows, it counts as absent."""
        good = value_of("k")
        for index in range(len(good)):
            bad = bytearray(good)
            bad[index] ^= 1
            assert parse_value("k", memoryview(bad)) is None, index

    @pytest.mark.parametrize("cut", [0, 5, 43, 44, 100, 300])
    def test_a_cut_value_is_none(self, cut: int) -> None:
        """A value that is cut short anywhere counts as absent."""
        assert parse_value("k", memoryview(value_of("k")[:cut])) is None

    def test_a_longer_value_is_none(self) -> None:
        """A value with bytes behind its rows counts as absent."""
        assert parse_value("k", memoryview(value_of("k") + b"x")) is None

    def test_another_keys_value_is_none(self) -> None:
        """A value that was written for another key counts as absent."""
        assert parse_value("other", memoryview(value_of("k"))) is None

    def test_odd_headers_are_none(self) -> None:
        """A header that is no JSON of ours, yet has its digest, counts as absent."""
        for text in (b"", b"[]", b'{"key": "k"}', b"\xff"):
            start = b"epdec1\0\0" + len(text).to_bytes(4, "little") + blake3(text).digest()
            assert parse_value("k", memoryview(start + text + ROWS)) is None
