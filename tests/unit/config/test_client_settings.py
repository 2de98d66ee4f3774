"""Settings of `epdctl instances …`."""

from __future__ import annotations

import pytest

from epdctl.cli import COMMANDS, load_reference
from epdctl.config import load_settings
from epdctl.config.client import DrainSettings, ProxySettings, RegisterSettings

pytestmark = pytest.mark.unit


def register(*arguments: str) -> RegisterSettings:
    """Return the settings of a registration."""
    return load_settings(RegisterSettings, "epdctl instances register", arguments)


def test_the_body_of_a_registration() -> None:
    """Flags become the JSON that the admin API takes."""
    settings = register(
        "HTTP://PD1:8002/",
        "--role=prefill_decode",
        "--ec-zmq-addrs=tcp://pd1:1,tcp://pd1:2",
        "--dp-size=2",
        "--labels=group=a,zone=b",
        "--model=m",
    )

    assert settings.registration() == {
        "role": "prefill_decode",
        "url": "http://pd1:8002",
        "ec_zmq_addrs": ("tcp://pd1:1", "tcp://pd1:2"),
        "dp_size": 2,
        "model": "m",
        "labels": {"group": "a", "zone": "b"},
        "kv_bootstrap_addr": None,
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--role=encode",), "INSTANCE"),
        (("http://e1:1",), "--role: Field required"),
        (("http://e1:1", "--role=chef"), "--role: "),
        (("e1:1", "--role=encode"), "the instance: url is not an instance URL"),
        (("http://e1:1", "--role=encode", "--url=proxy"), "--url: the proxy: url is not"),
        (("http://e1:1", "--role=encode", "--labels=a"), "--labels: 'a' must look like name=value"),
        (("http://e1:1", "--role=encode", "--labels=a=1,a=2"), "--labels: 'a' is given twice"),
        (("http://e1:1", "--role=encode", "--wait-ready=-1"), "--wait-ready: "),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Each mistake ends with exit code 2 and names its flag."""
    with pytest.raises(SystemExit) as raised:
        register(*arguments)

    assert raised.value.code == 2
    assert says in capsys.readouterr().err


def test_json_and_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """--json and EPDCTL_URL work for every command."""
    monkeypatch.setenv("EPDCTL_URL", "http://proxy:9/")
    settings = load_settings(DrainSettings, "epdctl instances drain", ("http://e1:1", "--json"))

    assert (settings.url, settings.json_output, settings.timeout) == ("http://proxy:9", True, 30.0)


def test_a_workers_checkpoint_is_not_an_instances_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """EPDCTL_MODEL, a worker's checkpoint, reaches no registration; EPDCTL_INSTANCE_MODEL does."""
    monkeypatch.setenv("EPDCTL_MODEL", "/models/qwen")
    unnamed = register("http://e1:1", "--role=encode")
    monkeypatch.setenv("EPDCTL_INSTANCE_MODEL", "m")
    named, flagged = (register("http://e1:1", "--role=encode", *more) for more in ((), ("--model=n",)))

    models = [settings.registration()["model"] for settings in (unnamed, named, flagged)]
    assert models == [None, "m", "n"]


def test_no_variable_means_different_things_to_a_client_and_to_a_worker() -> None:
    """What an operator exports for workers or the proxy changes nothing that an `instances` command does."""
    kinds = [load_reference(command.settings) for command in COMMANDS]
    clients = [kind for kind in kinds if issubclass(kind, ProxySettings)]
    others = [kind for kind in kinds if kind not in clients]
    shared = {name for kind in clients for name in kind.model_fields} & {
        name for kind in others for name in kind.model_fields
    }

    assert len(clients) == 5
    assert shared <= {"admin_api_key"}
