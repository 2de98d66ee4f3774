"""Keeps torch out of a front process.

transformers imports torch, and most of itself, for image processors that work on Pillow and numpy and never
touch it: 2.5 s of processor time at the start and 260 MB, beside an engine that is importing the same.

Rules of this file: called before transformers is imported, in a process of a front only. Where torch is
loaded already nothing changes.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_HIDDEN = ("torch", "torchvision")


class _AdviceFilter(logging.Filter):
    """Drops transformers' line that PyTorch was not found."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let everything else pass."""
        return "PyTorch was not found" not in record.getMessage()


def hide_torch() -> None:
    """Let `import torch` fail from now on, so that transformers does without it."""
    loaded: dict[str, Any] = sys.modules
    if "torch" in loaded:
        return
    logging.getLogger("transformers").addFilter(_AdviceFilter())
    for name in _HIDDEN:
        loaded[name] = None
