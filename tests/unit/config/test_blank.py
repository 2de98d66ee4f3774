"""Settings that are given blank text, of every command."""

from __future__ import annotations

import pytest
from pydantic_settings import CLI_SUPPRESS

from epdctl.cli import COMMANDS, Command, load_reference
from epdctl.config import load_settings, variable_of
from tests.unit.config.command_lines import required

pytestmark = pytest.mark.unit

MAY_BE_BLANK = {
    "store",
    "encode_servers_urls",
    "prefill_servers_urls",
    "decode_servers_urls",
    "ec_consumer_zmq_addrs",
    "stage_timeouts",
    "ec_zmq_addrs",
    "labels",
}
"""Nothing is the default of these, and `--prefill-servers-urls ''` is the reference proxy's word for none."""

TEXTS = [
    (command, name)
    for command in COMMANDS
    for name, field in load_reference(command.settings).model_fields.items()
    if field.annotation not in (int, float, bool, int | None)
    and CLI_SUPPRESS not in field.metadata
    and name not in MAY_BE_BLANK
]
KEYS = [
    (command, name)
    for command in COMMANDS
    for name, field in load_reference(command.settings).model_fields.items()
    if CLI_SUPPRESS in field.metadata
]


def name_of(value: object) -> object:
    """Return how a test's case is called."""
    return "-".join(value.words) if isinstance(value, Command) else value


def refusal(command: Command, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the first line that a refused command line says; it must end with exit code 2."""
    with pytest.raises(SystemExit) as end:
        load_settings(load_reference(command.settings), "epdctl", arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[0]


def test_there_are_such_settings() -> None:
    """The claims below are about hosts, URLs, folders, names and lists."""
    names = {name for _, name in TEXTS}

    assert {"host", "ec_ip", "kv_ip", "ec_advertise_host", "advertise_url", "kv_bootstrap_addr"} <= names
    assert {"model", "allowed_local_media_path", "log_dir", "mooncake_devices", "instance"} <= names


@pytest.mark.parametrize("blank", ["", " \t"], ids=["empty", "spaces"])
@pytest.mark.parametrize(("command", "name"), TEXTS, ids=name_of)
def test_blank_text_is_refused(
    command: Command, name: str, blank: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no host, folder or name: exit code 2, with the setting's name and what to do instead."""
    field = load_reference(command.settings).model_fields[name]
    flag = "--" + str(field.validation_alias or name).replace("_", "-")
    positional = name in ("instance", "shape")
    given = [blank] if positional else [f"{flag}={blank}"]

    said = refusal(command, [*given, *required(command, but=name)], capsys)

    assert said.startswith(f"epdctl: {name.upper() if positional else flag}: must not be empty")
    assert field.is_required() or said.endswith(f"leave it out and unset {variable_of(name, field)}")


@pytest.mark.parametrize("command", [c for c, name in TEXTS if name == "host"], ids=name_of)
def test_a_blank_variable_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable that is set to nothing does not open every address."""
    monkeypatch.setenv("EPDCTL_HOST", "")

    assert "unset EPDCTL_HOST" in refusal(command, required(command), capsys)


@pytest.mark.parametrize(("command", "name"), KEYS, ids=name_of)
def test_a_key_of_spaces_is_refused(
    command: Command, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody could give it, and a list of keys without one would leave the door open."""
    variable = variable_of(name, load_reference(command.settings).model_fields[name])
    monkeypatch.setenv(variable, "  ")

    said = refusal(command, required(command), capsys)

    assert (
        said == f"epdctl: {variable}: must not be empty: give a value, or leave it out and unset {variable}"
    )


@pytest.mark.parametrize("command", [c for c, name in KEYS if name == "admin_api_key"], ids=name_of)
def test_a_key_that_is_set_to_nothing_is_not_given(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every command an empty ADMIN_API_KEY is the same as none."""
    monkeypatch.setenv("ADMIN_API_KEY", "")
    static = ["--encode-servers-urls=http://e:1", "--decode-servers-urls=http://d:1"]
    given = [*required(command), *(static if command.words == ("serve",) else [])]

    settings = load_settings(load_reference(command.settings), "epdctl", given)

    assert vars(settings)["admin_api_key"] is None
