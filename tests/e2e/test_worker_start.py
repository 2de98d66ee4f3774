"""What keeps a worker from starting is told in one message that names the flag and the cure."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

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
