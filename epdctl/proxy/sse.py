"""Server-sent events, as far as a relay must know them: how a stream ends, and how to end one with an error.

Rules of this file: pure. Bytes pass unread; only the last few are remembered, to tell an answer that was
finished (`data: [DONE]`) from one that was cut off.
"""

from __future__ import annotations

from epdctl.errors import EpdError, envelope
from epdctl.wire import encode_json

_TAIL_BYTES = 64
_DONE = b"[DONE]"
_ENDS_OF_EVENT = (b"\n\n", b"\r\n\r\n", b"\r\r")


class StreamTail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Remember the end of `data`."""
        self._tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]

    @property
    def is_done(self) -> bool:
        """Whether the stream said that it is finished."""
        return any(
            line.startswith(b"data:") and line[5:].strip() == _DONE for line in self._tail.splitlines()
        )

    @property
    def is_between_events(self) -> bool:
        """Whether the last event was ended, so that another one can follow."""
        return not self._tail or self._tail.endswith(_ENDS_OF_EVENT)


def error_event(error: EpdError, tail: StreamTail) -> bytes:
    """Return the event that ends a stream with `error`; an event that was cut off is closed first."""
    opening = b"" if tail.is_between_events else b"\n\n"
    return opening + b"data: " + encode_json(envelope(error)) + b"\n\n"
