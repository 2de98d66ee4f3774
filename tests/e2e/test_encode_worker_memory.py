"""An encode engine holds the vision tower and nothing of the language model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.large_checkpoint import TOWER, write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.worker]

MB = 1_000_000


@pytest.mark.parametrize(
    "language_mb", [90, pytest.param(400, marks=pytest.mark.full)], ids=["90 MB", "400 MB"]
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_loading_costs_the_tower_and_no_more(tmp_path: Path, family: str, language_mb: int) -> None:
    """With float32 cast, private memory grows by less than 1.5 times the tower's float32 bytes, whatever the
    size of the language model; no language parameter is held."""
    total, tower = write_checkpoint(tmp_path / "model", language_mb, family)
    assert tower < total / 4 if language_mb < 300 else tower < total / 10 < total - 270 * MB

    command = [sys.executable, "-m", "tests.e2e.large_checkpoint", "measure", str(tmp_path / "model")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    seen = json.loads(ran.stdout)

    assert seen["grown"] < 1.5 * 2 * tower
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        wanted = {TOWER.sub("", key) for key in file.keys() if TOWER.match(key)}  # noqa: SIM118
    assert set(seen["names"]) == wanted
    assert seen["width"] == 1024
