"""Reads typed fields out of a request body; what is wrong is named by field, with what is allowed.

Rules of this file: a field that is absent or null is its default (clients send nulls for what they leave
out); booleans are never numbers; nothing is rounded or clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epdctl.errors import InvalidRequest


class Fields:
    """A JSON object of a request and the path to it, for messages."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def path(self, name: str) -> str:
        """Return the full name of a field."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """Return the value as it came, None when absent."""
        return self._values.get(name)

    def refuse(self, name: str, expected: str) -> InvalidRequest:
        """Return the error for a field that is not as `expected`; the value itself is not repeated."""
        return InvalidRequest(f"{self.path(name)} must be {expected}", param=self.path(name))

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer in [low, high], or None."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """Return a number in [low, high]."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return a string, or None."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def object(self, name: str) -> Mapping[str, Any] | None:
        """Return an object, or None."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a string or a list of strings as a tuple; none of them may be empty."""
        value = self.raw(name)
        listed = [value] if isinstance(value, str) else value
        if listed is None:
            return ()
        if not isinstance(listed, list) or len(listed) > most or not all(map(_is_text, listed)):
            raise self.refuse(name, f"a non-empty string or a list of at most {most} of them")
        return tuple(listed)

    def token_ids(self, name: str, most: int) -> tuple[int, ...]:
        """Return a list of token ids as a tuple."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > most or not all(map(is_token_id, value)):
            raise self.refuse(name, f"a list of at most {most} token ids")
        return tuple(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def is_token_id(value: object) -> bool:
    """Whether a JSON value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
