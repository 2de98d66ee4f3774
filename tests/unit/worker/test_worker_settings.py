"""Flags of the bundled workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from epdctl.config import load_settings
from epdctl.config.worker import EncodeSettings

pytestmark = pytest.mark.unit

PROG = "epdctl worker encode"
ON_DEVICE = ("--arena", "device", "--device", "cuda:0")
STORE = ("--mooncake-store", "10.0.0.9:50051")
SHARED = ("--ec-connector", "shared-filesystem", "--shared-storage-path")


def load(*arguments: str) -> EncodeSettings:
    """Return the settings of a command line."""
    return load_settings(EncodeSettings, PROG, ["--model", "m", *arguments])


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no variable of the machine in the way."""
    for name in ("ADMIN_API_KEY", "EPDCTL_REGISTER", "REGISTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--register", "ftp://x"), "--register"),
        (("--register", "http://x?y=1"), "--register"),
        (("--advertise-url", "x:1"), "--advertise-url"),
        (("--advertise-url", "http://a..b:1"), "--advertise-url: the host of 'http://a..b:1' is no name"),
        (("--register", f"http://{'a' * 64}:1"), "is no name and no IP address"),
        (("--allowed-media-domains", "a..b"), "--allowed-media-domains: 'a..b' is no host"),
        (("--mooncake-store", "a..b:1", "--mooncake-store-timeout", "1"), "--mooncake-store: 'a..b:1'"),
        (("--port", "70000"), "--port"),
        (("--max-items", "9", "--queue-items", "8"), "--queue-items must be at least --max-items"),
        (
            ("--allowed-media-domains", "a.example,http://x/"),
            "--allowed-media-domains: 'http://x/' is no host",
        ),
        (("--allowed-media-domains", "x:8080"), "--allowed-media-domains: 'x:8080' is no host"),
        (("--allowed-media-domains", "*.example.com"), "--allowed-media-domains: '*.example.com' is no host"),
        (("--allowed-media-domains", "[::1]"), "--allowed-media-domains: '[::1]' is no host"),
        (("--media-memory-bytes", "1000"), "--media-memory-bytes must be at least --max-media-bytes"),
        (("--mooncake-ports", "40000-40100"), "--mooncake-ports"),
        (("--mooncake-ports", "15000"), "--mooncake-ports"),
        (("--mooncake-devices", "mlx5_0"), "--mooncake-devices are those of --mooncake-protocol rdma"),
        (("--allowed-local-media-path", "/no/such/folder"), "--allowed-local-media-path"),
        (("--reply-after", "never"), "--reply-after"),
        (("--dtype", "int8"), "--dtype"),
        (("--ec-connector", "shared-filesystem"), "--shared-storage-path need each other"),
        (("--shared-storage-path", "."), "--ec-connector shared-filesystem and"),
        (("--ec-connector", "nfs"), "--ec-connector"),
        ((*SHARED, "/no/such/folder"), "--shared-storage-path /no/such/folder: no such folder"),
        ((*SHARED, ".", "--reply-after", "encode"), "--reply-after encode does not go with"),
        (("--arena", "gpu"), "--arena"),
        (("--arena", "device"), "--arena device is memory of a GPU: give one by --device, not cpu"),
        (
            ("--device", "cpu:3"),
            "--device: 'cpu:3' is no device that is served: give cpu, cuda or cuda:N; a CPU",
        ),
        (("--device", "cuda:"), "--device: 'cuda:' is no device that is served"),
        (("--device", "cuda:-1"), "--device: 'cuda:-1' is no device that is served"),
        (("--device", "mps"), "--device: 'mps' is no device that is served"),
        (("--allowed-media-domains", ","), "--allowed-media-domains: ',' names nothing"),
        ((*SHARED, ".", *ON_DEVICE), "--arena device does not go with --ec-connector shared-filesystem"),
        (
            (*SHARED, ".", "--mooncake-protocol", "rdma"),
            "--mooncake-protocol does nothing with --ec-connector shared-filesystem and no --mooncake-store: "
            "leave it out",
        ),
        ((*SHARED, ".", "--mooncake-protocol", "tcp"), "--mooncake-protocol does nothing with"),
        ((*SHARED, ".", "--mooncake-ports", "15000-15100"), "--mooncake-ports does nothing with"),
        (
            ("--mooncake-store-segment-bytes", "5"),
            "--mooncake-store-segment-bytes does nothing without --mooncake-store: leave it out",
        ),
        (("--mooncake-store-buffer-bytes", "67108864"), "--mooncake-store-buffer-bytes does nothing"),
        (("--mooncake-store-timeout", "1"), "--mooncake-store-timeout does nothing without"),
        (("--data-parallel-size", "0"), "--data-parallel-size"),
        (("--data-parallel-size", "2", "--device", "cuda:1"), "--device cuda:1 is one device"),
        (("--no-such-flag", "1"), "--no-such-flag"),
    ],
)
def test_wrong_flag_is_named(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value ends with exit 2 and one message that names its flag."""
    with pytest.raises(SystemExit) as end:
        load(*arguments)

    assert end.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        (*SHARED, "."),
        (*SHARED, ".", *STORE, "--mooncake-protocol", "rdma", "--mooncake-ports", "15000-15100"),
        (*SHARED, ".", "--advertise-url", "http://e:1"),  # where no route tells the address
        (*STORE, "--mooncake-store-segment-bytes", "0", "--mooncake-store-timeout", "1"),
        ("--mooncake-protocol", "rdma", "--mooncake-ports", "15000-15100"),
    ],
)
def test_what_has_a_use_is_taken(arguments: tuple[str, ...]) -> None:
    """A shared store goes over Mooncake whatever the connector, and what was not given is not refused."""
    assert load(*arguments).model == "m"


def test_a_variable_without_a_use_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes from a variable is refused like its flag, and the cure is to unset it."""
    monkeypatch.setenv("EPDCTL_MOONCAKE_STORE_TIMEOUT", "1")

    with pytest.raises(SystemExit):
        load()

    said = capsys.readouterr().err
    assert "--mooncake-store-timeout does nothing without --mooncake-store" in said
    assert "unset EPDCTL_MOONCAKE_STORE_TIMEOUT" in said


def test_a_variable_that_other_workers_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment may serve a whole deployment, whose language workers use Mooncake."""
    monkeypatch.setenv("EPDCTL_MOONCAKE_PORTS", "15000-15100")

    assert load(*SHARED, ".").ec_connector == "shared-filesystem"


def test_registration_comes_from_flag_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--register` is also EPDCTL_REGISTER, checked in the same way; the flag wins."""
    assert load().register_url is None
    monkeypatch.setenv("EPDCTL_REGISTER", "http://proxy:8000/")

    assert load().register_url == "http://proxy:8000"
    assert load("--register", "http://other:8000").register_url == "http://other:8000"
    monkeypatch.setenv("EPDCTL_REGISTER", "proxy")
    with pytest.raises(SystemExit):
        load()


def test_key_is_no_flag_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The admin key comes from ADMIN_API_KEY only, and settings do not print it."""
    monkeypatch.setenv("ADMIN_API_KEY", "very-secret")
    settings = load()

    assert settings.admin_api_key is not None
    assert settings.admin_api_key.get_secret_value() == "very-secret"
    assert "very-secret" not in repr(settings)
    with pytest.raises(SystemExit):
        load("--admin-api-key", "x")


def test_lists_and_names(tmp_path: Path) -> None:
    """Hosts are a comma-separated list; the served name defaults to the model."""
    settings = load("--allowed-media-domains", "a.example, b.example,")

    assert settings.allowed_media_domains == ("a.example", "b.example")
    assert (settings.model_name, load("--served-model-name", "n").model_name) == ("m", "n")
    assert load("--allowed-local-media-path", str(tmp_path)).allowed_local_media_path == tmp_path


def test_rdma_devices_are_a_list() -> None:
    """Devices are passed on in the order given, with the protocol that has them."""
    settings = load("--mooncake-protocol", "rdma", "--mooncake-devices", "mlx5_0,mlx5_1")
    assert settings.mooncake_devices == ("mlx5_0", "mlx5_1")


def test_engine_gets_what_mooncake_must_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's variables are in the engine's environment; what the operator set himself wins."""
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")

    environment = load("--mooncake-ports", "16000-16100").engine_environment()

    assert (environment["MC_MIN_RPC_PORT"], environment["MC_MAX_RPC_PORT"]) == ("16000", "16100")
    assert (environment["MC_FORCE_TCP"], environment["MC_LOG_LEVEL"]) == ("1", "INFO")
    assert "MC_USE_IPV6" not in environment
    assert load().engine_environment("::1")["MC_USE_IPV6"] == "1"


@pytest.mark.parametrize(
    ("device", "size", "devices"),
    [
        ("cpu", 1, ("cpu",)),
        ("cpu", 3, ("cpu", "cpu", "cpu")),
        ("cuda", 1, ("cuda",)),
        ("cuda:3", 1, ("cuda:3",)),
        ("cuda", 2, ("cuda:0", "cuda:1")),
    ],
)
def test_each_engine_has_a_device(device: str, size: int, devices: tuple[str, ...]) -> None:
    """Engines share the CPU and get a device each of any other kind; one engine takes what is named."""
    settings = load("--device", device, "--data-parallel-size", str(size))

    assert settings.engine_devices == devices


def test_hosts_that_media_may_come_from() -> None:
    """Names, with or without a final dot, and addresses of both kinds are hosts."""
    hosts = ("images.example.com", "localhost.", "10.0.0.5", "::1", "my_host-1", "bücher.example")

    assert load("--allowed-media-domains", ",".join(hosts)).allowed_media_domains == hosts
