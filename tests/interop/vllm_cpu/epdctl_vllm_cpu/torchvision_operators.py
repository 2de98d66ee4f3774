"""Let a CUDA build of torchvision be imported beside a CPU build of torch.

Rules of this file: it runs at the start of every Python process of the environment, so it imports nothing
until torchvision is asked for; nothing that vLLM does on a CPU calls the two operators, so their signatures
are enough."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareOperators(MetaPathFinder):
    """Declares the operators just before torchvision is imported; finds nothing itself."""

    def __init__(self) -> None:
        self._library: object = None  # torch forgets the operators when this is collected

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Declare on the first import of torchvision; return None always."""
        if fullname == "torchvision" and self._library is None:
            self._library = _declare()
        return None


def _declare() -> object:
    try:
        import torch
    except ImportError:
        return ()
    library = torch.library.Library("torchvision", "FRAGMENT")
    for signature in SIGNATURES:
        try:
            library.define(signature)
        except RuntimeError:  # a working extension has declared it already
            continue
    return library


sys.meta_path.insert(0, DeclareOperators())
