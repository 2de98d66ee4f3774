"""What is moved: a number of items of one size to each of some consumers.

Rules of this file: plain data.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST = "127.0.0.1"
WIDTH = 2048
ROW_BYTES = 2 * WIDTH
SIZES = (64 * 1024, 256 * 1024, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20)
TOTAL_BYTES = 192 * 2**20
"""About what one case moves to each consumer, so that it takes long enough to be measured."""
FEWEST, MOST = 16, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`items` of `nbytes` for each of `consumers`."""

    nbytes: int
    items: int
    consumers: int

    @property
    def name(self) -> str:
        """Such as `1 MB x 64 to 2`."""
        size = f"{self.nbytes // 2**20} MB" if self.nbytes >= 2**20 else f"{self.nbytes // 1024} KB"
        return f"{size} x {self.items} to {self.consumers}"

    @property
    def total_bytes(self) -> int:
        """What all consumers get together."""
        return self.nbytes * self.items * self.consumers


def shape_of(nbytes: int) -> tuple[int, int]:
    """Return the shape of a bfloat16 item of `nbytes`."""
    return nbytes // ROW_BYTES, WIDTH


def items_of(nbytes: int, total_bytes: int = TOTAL_BYTES) -> int:
    """Return how many items of `nbytes` one consumer gets."""
    return min(MOST, max(FEWEST, total_bytes // nbytes))
