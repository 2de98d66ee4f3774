"""What libraries write on stderr: told once, in our words, and bounded."""

from __future__ import annotations

import pytest

from epdctl.worker.native_output import QUIET_S, NativeOutput, Said

pytestmark = pytest.mark.unit

LINE = (
    b"E1130 00:38:39.123456 12345 transfer_metadata_plugin.cpp:1030] connect()10.0.0.5:15001: refused [111]\n"
)
SAID = Said(
    severity="E", source="transfer_metadata_plugin.cpp:1030", text="connect()10.0.0.5:15001: refused [111]"
)


def test_a_line_of_glog_is_taken_apart() -> None:
    """Severity, place and text; time and thread are the log's business."""
    assert NativeOutput().take(LINE, 0.0) == [SAID]


def test_other_lines_are_told_as_they_are() -> None:
    """Lines of no known form, and bytes that are no text, are told; empty ones and glog's banner are not."""
    data = b"terminate called\n\n  \nWARNING: Logging before InitGoogleLogging() is written to STDERR\n\xff\n"

    assert NativeOutput().take(data, 0.0) == [Said(text="terminate called"), Said(text="\ufffd")]


def test_lines_may_come_in_pieces() -> None:
    """However the bytes are cut, lines are whole."""
    output = NativeOutput()

    said = [line for at in range(len(LINE)) for line in output.take(LINE[at : at + 1], 0.0)]

    assert said == [SAID]


def test_the_same_text_is_told_once_in_a_while() -> None:
    """A text that comes every two seconds, each time with another time, is told every `QUIET_S`, counted."""
    output = NativeOutput()
    told = [
        (second, line.repeated)
        for second in range(0, int(2 * QUIET_S) + 2, 2)
        for line in output.take(LINE.replace(b"39.1", b"%02d.1" % (second % 60)), float(second))
    ]

    assert told == [(0, 0), (int(QUIET_S), int(QUIET_S) // 2 - 1), (int(2 * QUIET_S), int(QUIET_S) // 2 - 1)]


def test_another_place_or_text_is_another_line() -> None:
    """Only the very same is kept back."""
    output = NativeOutput()
    output.take(LINE, 0.0)

    assert len(output.take(LINE.replace(b"10.0.0.5", b"10.0.0.6") + LINE.replace(b":1030", b":7"), 1.0)) == 2


def test_it_is_bounded() -> None:
    """A line without an end is cut, and texts without number are forgotten again."""
    output = NativeOutput()

    assert [len(line.text) for line in output.take(b"x" * 10_000, 0.0)] == [4096]
    output.take(b"".join(b"text %d\n" % number for number in range(5000)), 0.0)
    assert len(output._told) <= 1024
