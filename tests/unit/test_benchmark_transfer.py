"""The transfer benchmark: its command line and its cases."""

from __future__ import annotations

import pytest

from benchmarks.transfer.__main__ import cases_of, parse_arguments

pytestmark = [pytest.mark.unit, pytest.mark.worker]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--sizes", "x"), "argument --sizes: 'x' is no whole number of at least 1"),
        (("--sizes", "64,"), "argument --sizes: '' is no whole number of at least 1"),
        (("--sizes", "3"), "argument --sizes: 3 is no multiple of 4 KiB up to 262144"),
        (("--sizes", "262148"), "argument --sizes: 262148 is no multiple of 4 KiB up to 262144"),
        (("--consumers", "0"), "argument --consumers: '0' is no whole number of at least 1"),
        (("--rounds", "0"), "argument --rounds: '0' is no whole number of at least 1"),
        (("--sets", "0"), "argument --sets: '0' is no whole number of at least 1"),
        (("--total-mb", "-1"), "argument --total-mb: '-1' is no whole number of at least 1"),
    ],
)
def test_wrong_option_is_a_usage_error(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong number ends with 2 and names its option, before anything is started."""
    with pytest.raises(SystemExit) as end:
        parse_arguments(arguments)

    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_cases_are_sizes_by_consumers() -> None:
    """Each size goes to each number of consumers; large ones to one consumer only, to bound memory."""
    options = parse_arguments(("--sizes", "64,16384", "--consumers", "1,2", "--total-mb", "4"))

    assert [case.name for case in cases_of(options)] == [
        "64 KB x 64 to 1",
        "16 MB x 16 to 1",
        "64 KB x 64 to 2",
    ]
