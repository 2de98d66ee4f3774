"""Deadlines of a request's stages, and how the command line names them.

Rules of this file: pure; the defaults of `--stage-timeouts` exist here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeouts:
    """Deadlines of a request's stages, in seconds.

    `connect` is opening a connection; `encode` and `prefill` are whole calls; `first_byte` is decode's
    headers; `idle` is the longest silence inside a response; `queue` is the wait for a slot of
    `--max-concurrent-requests`.
    """

    connect: float = 5.0
    encode: float = 60.0
    prefill: float = 300.0
    first_byte: float = 300.0
    idle: float = 300.0
    queue: float = 30.0


def parse_stage_timeouts(text: str) -> StageTimeouts:
    """Return the defaults with the pairs of `text` (`encode=60,idle=300`); ValueError names a bad one."""
    known = [field.name for field in fields(StageTimeouts)]
    given: dict[str, float] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in pair.partition("="))
        if name not in known:
            raise ValueError(f"unknown stage '{name}' (known: {', '.join(known)})")
        given[name] = _positive_seconds(pair, value)
    return replace(StageTimeouts(), **given)


def _positive_seconds(pair: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        raise ValueError(f"'{pair}' needs a number of seconds, for example encode=60") from None
    if not 0 < seconds <= 86_400:
        raise ValueError(f"'{pair}' must be above 0 and at most 86400 seconds")
    return seconds
