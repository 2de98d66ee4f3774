"""What a check of an expectation is: its subject, its words, and the failures it yields.

Rules of this file: pure; every key of an expectation is either a check or a modifier that some check reads,
and one that is neither is a failure by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tests.cases.world import World

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Subject(Generic[S]):
    """What is checked (`things`), with the whole expectation for checks that need a second word."""

    world: World
    things: list[S]
    words: Mapping[str, Any]


Check = Callable[[Subject[S], Any], Iterable[str]]


def run_checks(
    subject: Subject[S], checks: Mapping[str, Check[S]], modifiers: frozenset[str]
) -> Iterator[str]:
    """Yield every failure of an expectation, unknown words included."""
    ran = False
    for word, value in subject.words.items():
        if word in checks:
            ran = True
            yield from checks[word](subject, value)
        elif word not in modifiers:
            yield f"the word {word!r} has no meaning here"
    if not ran:
        yield f"nothing to check in {dict(subject.words)}"


def as_list(value: Any) -> list[Any]:
    """Return a list: the value's own, or the value alone."""
    return value if isinstance(value, list) else [value]


def cut(value: Any, length: int = 300) -> str:
    """Return a short form of a value for a failure message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else text[:length] + f"...({len(text)})"
