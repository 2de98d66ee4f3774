"""Claims about the command table."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from epdctl.cli import COMMANDS, Command, find_command, load_reference, main

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c.words))
def test_every_command_has_its_settings(command: object) -> None:
    """Each row of the table names a settings class that exists and tells its user how to use it."""
    settings = load_reference(command.settings)

    assert "xamples:" in settings.__doc__


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["instances", "--help"], ["worker", "-h"]])
def test_help_is_printed_and_is_no_failure(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Asking for help, also of a group of commands, prints it on stdout and ends with 0."""
    assert main(words) == 0
    assert "usage: epdctl" in capsys.readouterr().out


def test_help_of_a_group_lists_its_commands_only(capsys: pytest.CaptureFixture[str]) -> None:
    """`epdctl worker --help` names the workers and nothing else."""
    main(["worker", "--help"])

    printed = capsys.readouterr().out
    assert "epdctl worker encode" in printed
    assert "epdctl serve" not in printed


@pytest.mark.parametrize("words", [[], ["instances"], ["bogus"], ["worker", "bogus"]])
def test_no_command_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command line without a command, or with an unknown one, ends with 2."""
    assert main(words) == 2
    assert "epdctl" in "".join(capsys.readouterr())


def test_the_longest_words_decide() -> None:
    """`worker prefill-decode` is not taken for `worker prefill`."""
    found = find_command(["worker", "prefill-decode", "--port", "1"])

    assert found is not None
    assert found.words == ("worker", "prefill-decode")


STUCK = """
import sys, time
import epdctl.cli as cli
assert "pydantic" not in sys.modules, "something slow is imported before signals are seen to"
def load(reference):
    print("loading", flush=True)
    time.sleep(60)
cli.load_reference = load
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        (("worker", "encode"), signal.SIGTERM, 0),
        (("worker", "decode"), signal.SIGINT, 0),
        (("serve",), signal.SIGTERM, 0),
        (("instances", "list"), signal.SIGINT, 130),
        (("instances", "list"), signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_signal_while_modules_are_loaded(words: tuple[str, ...], number: signal.Signals, code: int) -> None:
    """Told to end before it has begun, what serves ends with 0, a client command as usual: in silence."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == code
    assert errors == ""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c.words))
def test_help_speaks_of_no_python_types(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists and defaults are shown as a user writes them."""
    with pytest.raises(SystemExit) as end:
        main([*command.words, "--help"])

    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert "[str" not in printed
    assert "variable_" not in printed
