"""RDMA is used when it is asked for, or the worker does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from epdctl.worker.engine import StartFailed
from epdctl.worker.transport import check_transport

pytestmark = pytest.mark.unit


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return a folder like the kernel's, with an active device and one whose port is down."""
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    return tmp_path


def test_tcp_needs_nothing(tmp_path: Path) -> None:
    """TCP is what it is, whatever devices and variables there are."""
    assert check_transport("tcp", (), {"MC_FORCE_TCP": "1"}, tmp_path / "none") == "tcp"


@pytest.mark.parametrize("names", [(), ("mlx5_0",), ("mlx5_1", "mlx5_0")])
def test_rdma_with_an_active_device_is_rdma(devices: Path, names: tuple[str, ...]) -> None:
    """One active port among the devices that may be used is enough."""
    assert check_transport("rdma", names, {}, devices) == "rdma"


@pytest.mark.parametrize(
    ("names", "environment", "words"),
    [
        ((), {"MC_FORCE_TCP": "1"}, "MC_FORCE_TCP forbids it: unset it, or give --mooncake-protocol tcp"),
        ((), {"MC_FORCE_TCP": ""}, "MC_FORCE_TCP forbids it"),
        (("mlx5_7",), {}, "--mooncake-devices mlx5_7: there is no such RDMA device, but mlx5_0, mlx5_1"),
        (("mlx5_1",), {}, "no port of mlx5_1 is active"),
    ],
)
def test_rdma_that_would_be_something_else_is_refused(
    devices: Path, names: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    """What would make Mooncake take TCP in silence ends the start, and the text names the cure."""
    with pytest.raises(StartFailed) as failure:
        check_transport("rdma", names, environment, devices)
    assert words in str(failure.value)


@pytest.mark.parametrize("there", [True, False])
def test_rdma_without_devices_is_refused(tmp_path: Path, there: bool) -> None:
    """No folder of devices, or an empty one: the flag is named."""
    folder = tmp_path / "infiniband"
    if there:
        folder.mkdir()
    with pytest.raises(StartFailed, match="--mooncake-protocol rdma: this machine has no RDMA device"):
        check_transport("rdma", (), {}, folder)
