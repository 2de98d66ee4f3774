"""Settings that are numbers of seconds, of every command."""

from __future__ import annotations

import pytest

from epdctl.cli import COMMANDS, Command, load_reference
from epdctl.config import load_settings
from tests.unit.config.command_lines import required

pytestmark = pytest.mark.unit

SECONDS = [
    (command, name)
    for command in COMMANDS
    for name, field in load_reference(command.settings).model_fields.items()
    if field.annotation is float
]


def test_there_are_such_settings() -> None:
    """The claim below is about the timeouts of the workers, the proxy and the client commands."""
    names = {name for _, name in SECONDS}

    assert {"transfer_timeout", "mooncake_store_timeout", "probe_timeout", "kv_lease", "wait_ready"} <= names


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400", "1e300"])
@pytest.mark.parametrize(("command", "name"), SECONDS, ids=lambda v: v if isinstance(v, str) else v.words[-1])
def test_number_that_is_no_time_is_refused(
    command: Command, name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Infinity, not-a-number and what no clock can count end with 2, and the message names the flag."""
    settings = load_reference(command.settings)
    flag = "--" + name.replace("_", "-")

    with pytest.raises(SystemExit) as end:
        load_settings(settings, "epdctl", [*required(command), f"{flag}={value}"])

    assert end.value.code == 2
    assert flag + ": " in capsys.readouterr().err
