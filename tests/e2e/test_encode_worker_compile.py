"""`--compile` on a real worker: active and said to be, or no worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.encode_worker import part, picture, start_worker

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.full]


async def test_a_compiled_worker_says_so(tmp_path: Path) -> None:
    """The worker serves, `/metrics` counts graphs, and the log names them."""
    started = start_worker(tmp_path, "--compile")
    try:
        await started.process.wait_until(started.is_healthy, "healthy", 400)
        reply = await started.encode(part(picture()), timeout_s=120)
        graphs = await started.metric("epdctl_tower_compiled_graphs")

        assert reply.status == 200
        assert graphs > 0
        await started.process.wait_until(lambda: "tower_compiled" in started.process.stderr, "logged", 30)
    finally:
        started.process.close()


async def test_without_a_compiler_it_does_not_start(tmp_path: Path) -> None:
    """Asked for and not possible: exit code 1 and the reason, never a worker that runs without."""
    cache = str(tmp_path / "inductor")
    env = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    started = start_worker(tmp_path, "--compile", env=env)
    try:
        assert await started.process.wait_exit(400) == 1
        assert "--compile: the tower cannot be compiled here" in started.process.stderr
    finally:
        started.process.close()
