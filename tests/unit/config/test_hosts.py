"""Settings of the language workers that are hosts."""

from __future__ import annotations

import pytest

from epdctl.config import load_settings
from epdctl.config.language import EcConsumerSettings, PrefillSettings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("flag", ["--ec-ip", "--ec-advertise-host", "--kv-ip"])
@pytest.mark.parametrize("value", ["a..b", "a" * 64, "10.0.0.5:14579", "[::1]", "tcp://a"])
def test_what_is_no_host_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A text that can be no host ends the command with 2 and the flag's name, before anything is bound."""
    with pytest.raises(SystemExit) as end:
        load_settings(PrefillSettings, "epdctl", ["--model=m", flag, value])

    assert end.value.code == 2
    assert f"{flag}: '{value}' is no host" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0.0.0.0", "::", "pd-0.pd", "::1", "fe80::1%eth0"])
def test_names_and_addresses_are_taken_as_they_are(value: str) -> None:
    """Addresses to listen on, wildcards too, and names."""
    settings = load_settings(EcConsumerSettings, "epdctl", ["--model=m", "--ec-ip", value])

    assert settings.ec_ip == value
