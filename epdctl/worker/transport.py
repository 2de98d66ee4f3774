"""What carries embeddings and KV: found out before anything slow is started.

    transport = check_transport("rdma", devices, environment)   # "tcp" or "rdma"; StartFailed names the cure

Rules of this file: reads /sys, starts nothing. Mooncake (0.3.13) takes TCP in silence when it is told to use
RDMA and has no device for it, or when MC_FORCE_TCP is set to anything; so it is not told to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from epdctl.worker.engine import StartFailed

DEVICES = Path("/sys/class/infiniband")
_CURE = "give --mooncake-protocol tcp"


def check_transport(
    protocol: str, devices: Sequence[str], environment: Mapping[str, str], folder: Path = DEVICES
) -> str:
    """Return `protocol` when Mooncake will use it here; `environment` is what Mooncake will see.

    Raises:
        StartFailed: it would use something else; the text names flag and cure.
    """
    if protocol != "rdma":
        return protocol
    if "MC_FORCE_TCP" in environment:
        raise StartFailed(
            f"--mooncake-protocol rdma: the variable MC_FORCE_TCP forbids it: unset it, or {_CURE}"
        )
    known = _names(folder)
    if not known:
        raise StartFailed(
            f"--mooncake-protocol rdma: this machine has no RDMA device (none in {folder}): {_CURE}"
        )
    unknown = [name for name in devices if name not in known]
    if unknown:
        raise StartFailed(
            f"--mooncake-devices {unknown[0]}: there is no such RDMA device, but {', '.join(known)}"
        )
    wanted = devices or known
    if not any(_is_active(folder / name) for name in wanted):
        text = f"no port of {', '.join(wanted)} is active ({folder}/*/ports/*/state)"
        raise StartFailed(f"--mooncake-protocol rdma: {text}: bring one up, or {_CURE}")
    return protocol


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _is_active(device: Path) -> bool:
    try:
        return any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))
    except OSError:
        return False
