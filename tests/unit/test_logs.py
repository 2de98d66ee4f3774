"""Log lines: one JSON object each, with level and time."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from epdctl.logs import json_line

pytestmark = pytest.mark.unit


def test_a_line_has_level_and_time() -> None:
    """An event becomes one JSON object with its facts, its level, and the time in UTC."""
    line = json.loads(json_line(None, "info", {"event": "x", "elapsed_s": 0.5, "stages": [{"a": 1}]}))
    at = datetime.fromisoformat(line.pop("timestamp"))
    assert line == {"event": "x", "elapsed_s": 0.5, "stages": [{"a": 1}], "level": "info"}
    assert abs((datetime.now(UTC) - at).total_seconds()) < 60


def test_a_line_is_one_line() -> None:
    """Line breaks in facts do not break the line."""
    assert b"\n" not in json_line(None, "warning", {"event": "x", "reason": "a\nb"})


def test_an_exception_has_its_traceback() -> None:
    """An exception is an error with the traceback as text."""
    try:
        raise ValueError("broken")
    except ValueError as error:
        line = json.loads(json_line(None, "exception", {"event": "x", "exc_info": error}))
    assert line["level"] == "error"
    assert "ValueError: broken" in line["exception"]


def test_odd_facts_are_written_too() -> None:
    """A fact that JSON does not know is written as its representation."""
    assert json.loads(json_line(None, "info", {"event": "x", "fact": object}))["fact"] == "<class 'object'>"
