"""Small pieces of text that several settings share.

Rules of this file: pure; what is wrong raises ValueError with the flag's name, which pydantic shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from epdctl.errors import EpdError

T = TypeVar("T")

_DEVICE = re.compile(r"(cpu|cuda|cuda:(0|[1-9][0-9]{0,3}))\Z")


def split_list(text: str) -> tuple[str, ...]:
    """Return the non-empty pieces of a comma-separated list."""
    return tuple(piece.strip() for piece in text.split(",") if piece.strip())


def split_pairs(flag: str, text: str) -> dict[str, str]:
    """Return the pairs of `name=value,name=value`; ValueError for a piece that is none, or a name twice."""
    pairs: dict[str, str] = {}
    for piece in split_list(text):
        name, equals, value = (part.strip() for part in piece.partition("="))
        if not name or not equals:
            raise ValueError(f"{flag}: '{piece}' must look like name=value")
        if name in pairs:
            raise ValueError(f"{flag}: '{name}' is given twice")
        pairs[name] = value
    return pairs


def device_name(value: str) -> str:
    """Return the name of a device; ValueError for another than cpu, cuda and cuda:N."""
    if not _DEVICE.match(value):
        cpu = "; a CPU has no number" if value.startswith("cpu:") else ""
        raise ValueError(f"'{value}' is no device that is served: give cpu, cuda or cuda:N{cpu}")
    return value


def checked(what: str, check: Callable[[], T]) -> T:
    """Return what `check` returns; its failure becomes a ValueError that begins with `what`."""
    try:
        return check()
    except EpdError as error:
        raise ValueError(f"{what}: {error.message}") from None
