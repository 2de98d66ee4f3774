"""A front does without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.unit, pytest.mark.worker]

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys
from pathlib import Path
from epdctl.worker.encode.without_torch import hide_torch
hide_torch()
import transformers
from epdctl.worker.encode.processor import ImageProcessor
ImageProcessor(Path("models/tiny-vlm/qwen2_5_vl"), 1024)
import epdctl.worker.encode.video_processor
import epdctl.worker.encode.feature_processor
loaded = [name for name, module in sys.modules.items() if name.split(".")[0] == "torch" and module]
sys.exit(f"loaded: {loaded[:3]}" if loaded else 0)
"""


def test_processors_load_without_torch() -> None:
    """Every processor is imported, one is loaded, torch is not, and transformers has no remark about that."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "")
