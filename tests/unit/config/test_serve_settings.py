"""Settings of `epdctl serve`: flags, variables, checks and what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epdctl.config import load_settings
from epdctl.config.serve import ServeSettings
from epdctl.config.stages import StageTimeouts
from epdctl.domain import InstanceSpec, InstanceUrl, Role

pytestmark = pytest.mark.unit

STATIC = ("--encode-servers-urls", "http://e1:8001", "--decode-servers-urls", "http://d1:8002")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of the machine gets into a test."""
    import os

    for name in list(os.environ):
        if name.startswith("EPDCTL_") or name in ("ADMIN_API_KEY", "ENCODER_MAX_BATCH_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def load(*arguments: str) -> ServeSettings:
    """Return the settings of a command line."""
    return load_settings(ServeSettings, "epdctl serve", arguments)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a refused command line says; it must end with exit code 2 and say nothing on stdout."""
    with pytest.raises(SystemExit) as raised:
        load(*arguments)
    out, err = capsys.readouterr()
    assert (raised.value.code, out) == (2, "")
    assert "Traceback" not in err
    return err


def found(settings: ServeSettings) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return role, URL and addresses of the static instances."""
    return [(spec.role.value, spec.url, spec.ec_zmq_addrs) for spec in settings.static_specs()]


class TestStatic:
    """The flags of the reference proxy's static mode."""

    def test_decode_urls_are_prefill_decode_without_prefill(self) -> None:
        """E+PD: the decode servers do prefill too."""
        assert found(load(*STATIC)) == [
            ("encode", "http://e1:8001", ()),
            ("prefill_decode", "http://d1:8002", ()),
        ]

    @pytest.mark.parametrize("word", ["none", "disable", "", " ", "NONE", "Disable"])
    def test_words_for_no_prefill(self, word: str) -> None:
        """The reference's words for E+PD are understood in any case."""
        roles = [spec.role for spec in load(*STATIC, "--prefill-servers-urls", word).static_specs()]

        assert roles == [Role.ENCODE, Role.PREFILL_DECODE]

    def test_three_stages(self) -> None:
        """E+P+D: each flag is its role, in the order of the flags."""
        settings = load(*STATIC, "--prefill-servers-urls", "http://p1:1/, http://p2:1")

        assert [(role, url) for role, url, _ in found(settings)] == [
            ("encode", "http://e1:8001"),
            ("prefill", "http://p1:1"),
            ("prefill", "http://p2:1"),
            ("decode", "http://d1:8002"),
        ]

    def test_addresses_go_to_the_consumers_replicas(self) -> None:
        """Addresses are listed server by server, replica by replica."""
        settings = load(
            "--encode-servers-urls=http://e1:1",
            "--decode-servers-urls=http://d1:1,http://d2:1",
            "--ec-consumer-dp-size=2",
            "--ec-consumer-zmq-addrs=tcp://d1:1,tcp://d1:2,tcp://d2:1,tcp://d2:2",
        )

        assert [(s.dp_size, s.ec_zmq_addrs) for s in settings.static_specs()[1:]] == [
            (2, ("tcp://d1:1", "tcp://d1:2")),
            (2, ("tcp://d2:1", "tcp://d2:2")),
        ]

    def test_addresses_may_go_with_separate_prefill(self) -> None:
        """With prefill, the prefill instances are the consumers (the reference refuses this)."""
        settings = load(*STATIC, "--prefill-servers-urls=http://p1:1", "--ec-consumer-zmq-addrs=tcp://p1:5")

        assert found(settings)[1:] == [
            ("prefill", "http://p1:1", ("tcp://p1:5",)),
            ("decode", "http://d1:8002", ()),
        ]

    def test_static_and_dynamic_combine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Any part may be static while the rest registers."""
        monkeypatch.setenv("ADMIN_API_KEY", "k")

        assert found(load("--dynamic-registration", "--encode-servers-urls", "http://e1:1")) == [
            ("encode", "http://e1:1", ())
        ]

    def test_specs_are_static(self) -> None:
        """What the command line names is marked as such."""
        assert load(*STATIC).static_specs()[0] == InstanceSpec(
            url=InstanceUrl("http://e1:8001"), role=Role.ENCODE, static=True
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Static routing requires --encode-servers-urls and --decode-servers-urls"),
        (("--encode-servers-urls", "http://e:1"), "Static routing requires"),
        (("--dynamic-registration",), "--dynamic-registration requires ADMIN_API_KEY"),
        ((*STATIC, "--ec-consumer-dp-size", "0"), "--ec-consumer-dp-size: must be at least 1"),
        ((*STATIC, "--fail-threshold", "0"), "--fail-threshold: must be at least 1"),
        (
            (*STATIC, "--ec-consumer-zmq-addrs", "tcp://a:1,tcp://a:2"),
            "--ec-consumer-zmq-addrs must contain one address per consumer replica: expected 1 "
            "(1 servers x 1 replicas), got 2",
        ),
        ((*STATIC, "--ec-consumer-zmq-addrs", "http://a:1"), "--ec-consumer-zmq-addrs: ec_zmq_addrs: an EC"),
        ((*STATIC[:2], "--decode-servers-urls", "d1:8002"), "--decode-servers-urls: url is not"),
        ((*STATIC[:2], "--decode-servers-urls", "http://E1:8001/"), "http://e1:8001 is named twice"),
        ((*STATIC, "--port", "65536"), "--port: Input should be less than or equal to 65535"),
        ((*STATIC, "--port", "http"), "--port: "),
        ((*STATIC, "--probe-timeout", "0"), "--probe-timeout: Input should be greater than 0"),
        ((*STATIC, "--probe-interval", "nan"), "--probe-interval: Input should be a finite number"),
        ((*STATIC, "--encode-policy", "best"), "--encode-policy: Input should be 'round_robin'"),
        ((*STATIC, "--kv-connector", "smoke"), "--kv-connector: Input should be 'nixl' or 'mooncake'"),
        ((*STATIC, "--store", "redis://x"), "--store: 'redis://x' is neither 'memory' nor 'sqlite:PATH'"),
        ((*STATIC, "--store", "sqlite:"), "--store: sqlite needs a path"),
        ((*STATIC, "--store", "sqlite:/tmp/x"), "--store keeps dynamic instances only"),
        ((*STATIC, "--stage-timeouts", "encode"), "--stage-timeouts: 'encode' needs a number"),
        ((*STATIC, "--stage-timeouts", "lunch=3"), "--stage-timeouts: unknown stage 'lunch'"),
        ((*STATIC, "--stage-timeouts", "idle=-1"), "--stage-timeouts: 'idle=-1' must be above 0"),
        ((*STATIC, "--protect-reads"), "--protect-reads requires ADMIN_API_KEY"),
        ((*STATIC, "--api-key-file", "/no/such/file"), "--api-key-file: "),
        ((*STATIC, "--upstream-ca-file", "/no/such/file"), "--upstream-ca-file: "),
        ((*STATIC, "--admin-api-key", "k"), "--admin-api-key: give a key as the variable ADMIN_API_KEY"),
        ((*STATIC, "--api-keys=k"), "--api-keys: give a key as the variable EPDCTL_API_KEYS"),
        (
            (*STATIC, "--queue-size", "9"),
            "--queue-size does nothing without --max-concurrent-requests: leave it out",
        ),
        ((*STATIC, "--no-such-flag"), "epdctl serve: error: unrecognized arguments: --no-such-flag"),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Each mistake ends with exit code 2 and names its flag."""
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        (*STATIC, "--queue-size", "9", "--max-concurrent-requests", "2"),
        # One launch line for every shape: what only another shape has is no mistake.
        (*STATIC, "--stage-timeouts", "prefill=1,queue=1", "--prefill-policy", "round_robin"),
        (*STATIC, "--kv-connector", "nixl", "--upstream-ca-file", __file__),
        # The reference proxy takes these too, and does nothing with them.
        (*STATIC, "--evicted-ttl", "60", "--log-requests"),
        ("--dynamic-registration", "--ec-consumer-dp-size", "2"),
    ],
)
def test_lines_for_other_shapes_are_taken(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Flags that need another one are taken beside it; a launch line of the reference moves over."""
    monkeypatch.setenv("ADMIN_API_KEY", "k")

    assert load(*arguments).port == 8000


def test_variables_that_workers_read_too_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment may serve a whole deployment: only a flag is the proxy's own for certain."""
    monkeypatch.setenv("EPDCTL_QUEUE_SIZE", "9")

    assert load(*STATIC).queue_size == 9


class TestValues:
    """What settings turn into."""

    def test_defaults(self) -> None:
        """The defaults are the documented ones."""
        settings = load(*STATIC)
        timeouts = StageTimeouts(connect=5, encode=60, prefill=300, first_byte=300, idle=300, queue=30)

        assert (settings.host, settings.port) == ("0.0.0.0", 8000)
        assert (settings.probe_interval, settings.probe_timeout) == (5.0, 2.0)
        assert (settings.fail_threshold, settings.rise_threshold, settings.evicted_ttl) == (3, 1, 900.0)
        assert settings.timeouts() == timeouts
        assert (settings.decode_retries, settings.max_body_bytes, settings.max_items) == (1, 268435456, 64)
        assert (settings.max_json_depth, settings.max_concurrent_requests) == (64, 0)
        assert (settings.drain_delay, settings.shutdown_grace) == (5.0, 30.0)
        policies = {settings.encode_policy, settings.prefill_policy, settings.decode_policy}
        assert policies == {"round_robin"}

    def test_a_flag_beats_its_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Flag, then variable, then default."""
        monkeypatch.setenv("EPDCTL_PORT", "9001")
        monkeypatch.setenv("EPDCTL_NO_REWRITE", "true")

        assert (load(*STATIC).port, load(*STATIC).no_rewrite) == (9001, True)
        assert load(*STATIC, "--port", "9002").port == 9002

    def test_a_wrong_variable_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A variable is checked like its flag."""
        monkeypatch.setenv("ENCODER_MAX_BATCH_SIZE", "-1")

        assert "ENCODER_MAX_BATCH_SIZE: Input should be greater than or equal to 0" in refused(
            capsys, *STATIC
        )

    def test_the_references_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """ADMIN_API_KEY and ENCODER_MAX_BATCH_SIZE are read under the reference's names."""
        monkeypatch.setenv("ADMIN_API_KEY", "k")
        monkeypatch.setenv("ENCODER_MAX_BATCH_SIZE", "4")
        settings = load("--dynamic-registration")

        assert settings.encoder_max_batch_size == 4
        assert settings.admin_api_key is not None
        assert "'k'" not in repr(settings)

    def test_an_empty_key_is_no_key(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A variable that is set to nothing opens nothing."""
        monkeypatch.setenv("ADMIN_API_KEY", "")

        assert "requires ADMIN_API_KEY" in refused(capsys, "--dynamic-registration")

    def test_api_keys_without_a_key_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A list of commas would leave the door open, so it is an error."""
        monkeypatch.setenv("EPDCTL_API_KEYS", " , ")

        assert "EPDCTL_API_KEYS: there is no key in it" in refused(capsys, *STATIC)

    def test_negative_retries_are_none(self) -> None:
        """As in the reference, a negative number of retries means none."""
        assert load(*STATIC, "--decode-retries", "-3").decode_retries == 0

    def test_stage_timeouts_change_what_they_name(self) -> None:
        """Named stages change, the others keep their defaults."""
        timeouts = load(*STATIC, "--stage-timeouts", "encode=7, idle=0.5").timeouts()

        assert (timeouts.encode, timeouts.idle, timeouts.prefill) == (7.0, 0.5, 300.0)

    def test_api_keys_from_variable_and_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Both sources add up; blank lines are no keys."""
        path = tmp_path / "keys"
        path.write_text("one\n\n  two  \n")
        monkeypatch.setenv("EPDCTL_API_KEYS", "three, four")

        assert load(*STATIC, "--api-key-file", str(path)).data_plane_keys() == {"one", "two", "three", "four"}
        monkeypatch.delenv("EPDCTL_API_KEYS")
        assert load(*STATIC).data_plane_keys() == frozenset()

    def test_an_empty_key_file_is_refused(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """A file without keys would leave the door open, so it is an error."""
        path = tmp_path / "keys"
        path.write_text("\n")

        assert "--api-key-file: no key in" in refused(capsys, *STATIC, "--api-key-file", str(path))


class TestStore:
    """Where registrations are kept."""

    @pytest.fixture(autouse=True)
    def key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Dynamic registration needs a key."""
        monkeypatch.setenv("ADMIN_API_KEY", "k")

    def test_default_is_a_file_of_the_port(self, tmp_path: Path) -> None:
        """Each port has its own file in the user's state folder."""
        assert (
            load("--dynamic-registration", "--port", "8123").store_location()
            == tmp_path / "state" / "epdctl" / "serve-8123.db"
        )

    def test_state_folder_without_the_variable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Without XDG_STATE_HOME the folder is under the user's home."""
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))

        assert (
            load("--dynamic-registration").store_location()
            == tmp_path / ".local" / "state" / "epdctl" / "serve-8000.db"
        )

    @pytest.mark.parametrize(
        ("arguments", "location"),
        [
            (("--dynamic-registration", "--store", "memory"), None),
            (("--dynamic-registration", "--store", "sqlite:/x/r.db"), Path("/x/r.db")),
            (("--dynamic-registration", "--port", "0"), None),
            (STATIC, None),
        ],
    )
    def test_location(self, arguments: tuple[str, ...], location: Any) -> None:
        """Memory, a given file, and nothing to keep without dynamic instances or a fixed port."""
        assert load(*arguments).store_location() == location
