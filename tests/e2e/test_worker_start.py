"""A worker's start: what keeps it from starting is told in one message, and Ctrl-C ends it in silence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stubs.ports import free_port
from tests.stubs.process import Process, epdctl_command, start_process, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.timeout(120)]

MODEL = Path(__file__).parents[2] / "models" / "tiny-vlm" / "qwen2_5_vl"
LANGUAGE = ("prefill-decode", "prefill", "decode")


async def start(kind: str, *flags: str, model: Path = MODEL, **environment: str) -> tuple[int | None, str]:
    """Run a worker that cannot start; return its exit code and its stderr."""
    command = ["worker", kind, "--model", str(model), "--host", "127.0.0.1", "--port", "0", *flags]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epdctl", *command),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        _, stderr = await asyncio.wait_for(process.communicate(), 60.0)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, stderr.decode()


@pytest.mark.parametrize("kind", ["encode", *LANGUAGE])
async def test_rdma_that_would_be_tcp_ends_the_start(kind: str) -> None:
    """--mooncake-protocol rdma where Mooncake would take TCP in silence: exit 1, the flag, the cure."""
    code, stderr = await start(kind, "--mooncake-protocol", "rdma", MC_FORCE_TCP="1")

    assert code == 1
    assert stderr.startswith(f"epdctl worker {kind}: --mooncake-protocol rdma: ")
    assert "unset it, or give --mooncake-protocol tcp" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("encode", "--cache-bytes"),
        ("encode", "--cache-dram-bytes"),
        ("prefill-decode", "--ec-buffer-bytes"),
        ("prefill", "--kv-bytes"),
        ("decode", "--kv-bytes"),
    ],
)
async def test_memory_that_is_not_there_ends_the_start(kind: str, flag: str) -> None:
    """More memory than the machine has: exit 1, and one line with the flag, asked and available bytes."""
    code, stderr = await start(kind, flag, "99999999999999")

    assert code == 1
    assert stderr.startswith(f"epdctl worker {kind}: ")
    assert f"{flag} 99999999999999" in stderr
    assert "are available here: give fewer" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["encode", "prefill-decode"])
async def test_a_folder_without_a_model_is_told(kind: str, tmp_path: Path) -> None:
    """A folder that has no config.json ends the start, and just that is said."""
    flags = ("--ec-port", str(free_port())) if kind == "prefill-decode" else ()

    code, stderr = await start(kind, *flags, model=tmp_path)

    assert code == 1
    assert f"--model {tmp_path}: there is no config.json" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("kind", ["encode", "prefill-decode"])
async def test_a_temporary_folder_too_long_for_a_socket_is_named(kind: str, tmp_path: Path) -> None:
    """A TMPDIR whose sockets would have no valid path: exit 1, the path, what to do, and no traceback."""
    folder = tmp_path / ("a" * 110)
    folder.mkdir()
    flags = ("--ec-port", str(free_port())) if kind == "prefill-decode" else ()

    code, stderr = await start(kind, *flags, TMPDIR=str(folder))

    assert code == 1
    assert "too long for a socket: set TMPDIR to a shorter folder" in stderr
    assert "Traceback" not in stderr


@pytest.fixture
def starting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    """Start a worker of the kind that the test asks for; it ends with the test."""
    flags = ("--ec-port", str(free_port())) if request.param == "prefill-decode" else ()
    command = epdctl_command(
        "worker", request.param, "--model", str(MODEL), "--host", "127.0.0.1", "--port", "0"
    )
    process = start_process([*command, *flags], tmp_path, "worker")
    yield process
    process.close()


def engine_of(process: Process) -> list[Path]:
    """Return the engine process of a worker, if it is there."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = [Path("/proc", pid) for pid in children]
        return [child for child in found if ".engine" in (child / "cmdline").read_text()]
    return []


@pytest.mark.parametrize("starting", ["encode", "prefill-decode"], indirect=True)
@pytest.mark.parametrize("until", ["python", "torch"])
async def test_ctrl_c_while_the_engine_loads_writes_no_traceback(starting: Process, until: str) -> None:
    """SIGINT to all processes of the worker, as a terminal sends it, while its engine imports what it needs:
    exit 0, no line but the worker's own, and no process is left."""
    engines: list[Path] = []

    def loading() -> bool:
        engines[:] = engine_of(starting)
        with contextlib.suppress(OSError):
            return any(until in (engine / "maps").read_text() for engine in engines)
        return False

    await starting.wait_until(loading, f"the engine has loaded {until}", 60.0)
    os.killpg(starting.pid, signal.SIGINT)

    assert await starting.wait_exit(30.0) == 0
    assert "Traceback" not in starting.stderr
    assert "KeyboardInterrupt" not in starting.stderr
    await wait_until(lambda: not any(engine.exists() for engine in engines), "the engine's end", 10.0)
