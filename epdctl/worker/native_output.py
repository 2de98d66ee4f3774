"""What libraries of an engine process write on its stderr by themselves, as lines of our log.

    output = NativeOutput()
    for said in output.take(data, now): log.warning("native_output", …)

Mooncake writes such lines (glog's form), some of them again and again: for each consumer that has left, one
every two seconds, for ever. The same text is told once, and then at most every `QUIET_S`, with how often it
came.

Rules of this file: bytes in, lines out; no I/O, no clock. Bounded, whatever is written.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

QUIET_S = 600.0
_LONGEST = 4096
_TEXTS = 1024
_GLOG = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ ([^\]\s]+)\] (.*)")
_BANNER = "WARNING: Logging before InitGoogleLogging() is written to STDERR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One line: its text, glog's severity (I, W, E, F) and place in the source where it has them.

    `repeated` is how often it came since it was told last.
    """

    text: str
    severity: str = "W"
    source: str | None = None
    repeated: int = 0


@dataclass(slots=True)
class _Told:
    at: float
    since: int = 0


class NativeOutput:
    """See the module."""

    def __init__(self) -> None:
        self._rest = b""
        self._told: OrderedDict[tuple[str | None, str], _Told] = OrderedDict()

    def take(self, data: bytes, now: float) -> list[Said]:
        """Return what is to be told of `data`, which ends anywhere; `now` is in seconds."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        return list(self._tell(lines, now))

    def _tell(self, lines: list[bytes], now: float) -> Iterator[Said]:
        for line in lines:
            text = line[:_LONGEST].decode(errors="replace").strip()
            if text and text != _BANNER:
                yield from self._limit(_parsed(text), now)

    def _limit(self, said: Said, now: float) -> Iterator[Said]:
        key = (said.source, said.text)
        told = self._told.get(key)
        if told is not None and now - told.at < QUIET_S:
            told.since += 1
            return
        self._told[key] = _Told(now)
        self._told.move_to_end(key)
        while len(self._told) > _TEXTS:
            self._told.popitem(last=False)
        repeated = told.since if told is not None else 0
        yield Said(text=said.text, severity=said.severity, source=said.source, repeated=repeated)


def _parsed(text: str) -> Said:
    found = _GLOG.match(text)
    if found is None:
        return Said(text=text)
    return Said(severity=found[1], source=found[2], text=found[3])
