"""`scripts/gpu-check` without a GPU: it says what is missing, and its steps run on the CPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.encode import gpu
from benchmarks.encode.checkpoint import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.worker]

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"


async def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one line for what is missing: a package, or what the device lacks."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert await gpu.check(gpu.parse_arguments([])) == 2
    assert "missing: --device cuda:0: this build of torch has no CUDA" in capsys.readouterr().err

    monkeypatch.setattr(gpu, "NEEDED", ("torch", "nosuchpackage"))
    assert await gpu.check(gpu.parse_arguments(["--device", "cpu"])) == 2
    assert "missing: the Python package 'nosuchpackage'" in capsys.readouterr().err


def test_a_missing_interpreter_is_named() -> None:
    """The script itself says which Python it did not find."""
    environment = {**os.environ, "PYTHON": "/nowhere/python"}
    ran = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, "missing: /nowhere/python" in ran.stderr) == (2, True)


async def test_failing_tests_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing test run is a failure with its output, and so is one that does not end."""
    monkeypatch.setattr(gpu, "TESTS", ("tests/e2e/no_such_file.py",))
    failed = await gpu.run_tests("cpu", 60.0)
    late = await gpu.run_tests("cpu", 0.0)

    assert not failed["passed"] and "no_such_file" in failed["output"]
    assert not late["passed"] and late["summary"] == "not ended in time"


async def test_an_arena_on_the_device_that_cannot_be_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that does not start with its arena on the device is a failed step, and the check goes on."""
    write_checkpoint(tmp_path / "model", gpu.CPU.shape)
    plan = replace(gpu.CPU, device_loads=gpu.CPU.loads[:1])

    found = await gpu.with_device_arena(tmp_path / "model", plan, "cpu", [])
    gpu._show_device_arena(found)

    assert found == {"failed": "the worker ended with 2"}
    assert "arena in device memory: FAILED, the worker ended with 2" in capsys.readouterr().out
    assert gpu.GPU.device_loads and not gpu.CPU.device_loads


@pytest.mark.full
async def test_every_step_runs_on_the_cpu() -> None:
    """All tables are printed, and the exit code is 0 when the tests pass."""
    environment = {**os.environ, "PYTHON": sys.executable}
    process = await asyncio.create_subprocess_exec(
        SCRIPT, "--device", "cpu", env=environment, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(400):
        output, _ = await process.communicate()
    text = output.decode()

    assert process.returncode == 0, text
    assert "tests: passed" in text
    assert all(title in text for title in ("### throughput", "### push, GB/s", "### hits"))
