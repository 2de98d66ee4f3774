"""The launch scripts with bundled workers: they serve, and they clean up however they end."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.stubs.ports import free_ports
from tests.stubs.process import Process, start_process, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PORTS = {
    "launch_1e1pd.sh": ("ENCODE_PORT", "PREFILL_DECODE_PORT", "PROXY_PORT", "EC_PORT"),
    "launch_1e1p1d.sh": ("ENCODE_PORT", "PREFILL_PORT", "DECODE_PORT", "PROXY_PORT", "EC_PORT"),
}


class Launch:
    """Starts launch scripts and ends what they left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Process] = []

    def __call__(self, script: str, **variables: str) -> Process:
        """Start `script` on free ports; `variables` are laid over its environment."""
        ports = dict(zip(PORTS[script], map(str, free_ports(len(PORTS[script]))), strict=True))
        ports |= dict(zip(("STORE_PORT", "STORE_METRICS_PORT"), map(str, free_ports(2)), strict=True))
        environment = {"NUM_PROMPTS": "3", "LOG_PATH": str(self.folder / "logs"), "DEVICE_PLATFORM": "cpu"}
        process = start_process(
            [str(ROOT / "scripts" / script)],
            self.folder,
            f"{script}-{len(self.started)}",
            env={**environment, **ports, **variables},
        )
        self.started.append(process)
        return process

    def children(self) -> list[str]:
        """Return the command lines of processes that log into this test's folder's ports."""
        lines = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"LOG_PATH={self.folder / 'logs'}".encode() in entry.read_bytes():
                    lines.append((entry.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return [line for line in lines if line]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Launch scripts that end with the test."""
    launch = Launch(tmp_path)
    yield launch
    for process in launch.started:
        await process.stop(grace_s=20)


@pytest.mark.parametrize(
    "registration", ["1", pytest.param("0", marks=pytest.mark.full)], ids=["dynamic", "static"]
)
@pytest.mark.parametrize("script", PORTS)
async def test_a_local_picture_is_answered(launch: Launch, script: str, registration: str) -> None:
    """From nothing to the answer about a file:// picture, the only line on stdout; nothing stays behind.

    One script runs two encode engines, the other a Mooncake Store, which the encode worker joins.
    """
    engines, store = ("2", "0") if script == "launch_1e1pd.sh" else ("1", "1")
    variables = {"DATA_PARALLEL_SIZE_E": engines, "MOONCAKE_STORE": store}
    process = launch(script, DYNAMIC_REGISTRATION=registration, **variables)

    assert await process.wait_exit(200) == 0, process.logs
    assert process.stdout == "red\n"
    assert "3 of 3 requests" in process.stderr
    assert launch.children() == []
    joined = '"event":"store_up"' in (launch.folder / "logs" / "encode.log").read_text()
    assert joined is (store == "1")


async def test_ctrl_c_takes_everything_down(launch: Launch) -> None:
    """Ctrl-C while the workers start ends all of them, with exit code 130."""
    process = launch("launch_1e1pd.sh")
    await process.wait_until(lambda: "proxy: starting" in process.stderr, "all are starting", 60)

    process.send_signal(signal.SIGINT)

    assert await process.wait_exit(30) == 130, process.logs
    await wait_until(lambda: launch.children() == [], "no process is left")


async def test_a_worker_that_cannot_start_is_shown(launch: Launch) -> None:
    """A worker that ends at start ends the script with 1, the end of its log, and the other processes."""
    process = launch("launch_1e1pd.sh", MODEL=str(launch.folder / "no-such-model"))

    assert await process.wait_exit(100) == 1, process.logs
    assert re.search(r"^(encode|prefill-decode) ended; the end of .*log:", process.stderr, re.MULTILINE)
    await wait_until(lambda: launch.children() == [], "no process is left")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ENGINE": "other"}, "ENGINE=other"),
        ({"DEVICE_PLATFORM": "abacus"}, "DEVICE_PLATFORM=abacus"),
        ({"EC_CONNECTOR": "Carrier"}, "EC_CONNECTOR=Carrier"),
        ({"MOONCAKE_STORE": "yes"}, "MOONCAKE_STORE=yes"),
        ({"ENCODE_ENGINE": "vllm"}, "ENCODE_ENGINE=vllm"),
    ],
)
async def test_a_wrong_variable_is_named(launch: Launch, variables: dict[str, str], named: str) -> None:
    """A value that means nothing ends the script with 2 and says which one it is."""
    process = launch("launch_1e1pd.sh", **variables)

    assert await process.wait_exit(20) == 2
    assert named in process.stderr
