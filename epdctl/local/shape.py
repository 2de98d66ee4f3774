"""The shape of a local deployment: how many instances of each role.

Rules of this file: pure; a shape that names no complete topology does not exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from epdctl.domain import Role

_SHAPE = re.compile(r"(?P<e>[1-9][0-9]?)e(?P<p>[1-9][0-9]?)p(?:(?P<d>[1-9][0-9]?)d|(?P<pd>d))\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Instance counts; either `prefill_decode` is set (E+PD) or both `prefill` and `decode` (E+P+D)."""

    encode: int
    prefill: int = 0
    decode: int = 0
    prefill_decode: int = 0

    def roles(self) -> tuple[Role, ...]:
        """Return one role for each instance to start, consumers of embeddings first."""
        return (
            (Role.PREFILL_DECODE,) * self.prefill_decode
            + (Role.PREFILL,) * self.prefill
            + (Role.DECODE,) * self.decode
            + (Role.ENCODE,) * self.encode
        )


def parse_shape(text: str) -> Shape:
    """Return the shape that `text` (`1e1pd`, `2e1p2d`, …) names; raise ValueError saying what is allowed."""
    match = _SHAPE.match(text.lower())
    if match is None:
        raise ValueError(f"'{text}' is no shape: use XeYpd (as 1e1pd) or XeYpZd (as 2e1p2d), counts 1 to 99")
    encode, second = int(match["e"]), int(match["p"])
    if match["pd"]:
        return Shape(encode=encode, prefill_decode=second)
    return Shape(encode=encode, prefill=second, decode=int(match["d"]))
