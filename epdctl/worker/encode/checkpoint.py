"""Finds a checkpoint's files, and tells the vision tower's tensors from the language model's.

Rules of this file: no torch, no weight is read; the only reader of a checkpoint's index. Of a model on the
hub only what the tower needs is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epdctl.worker.encode.keys import identity_of
from epdctl.worker.engine import StartFailed

_PATCH_KEY = re.compile(r"(?:model\.)?visual\.(.+)\Z")
"""`visual.*` in the older layout of Qwen2-VL and Qwen2.5-VL, `model.visual.*` in the newer one."""
_FEATURE_KEY = re.compile(r"(?:model\.)?((?:vision_tower|multi_modal_projector)\..+|image_newline)\Z")
"""LLaVA, LLaVA-NeXT and Gemma 3; `model.` only in the newer layout, `vision_model.` only in the older one."""
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SMALL_FILES = ("*.json", "*.jinja", "*.txt")


def tower_name(key: str) -> str | None:
    """Return the tower's own name of the checkpoint tensor `key`, or None for a language tensor."""
    found = _PATCH_KEY.match(key) or _FEATURE_KEY.match(key)
    return found.group(1).replace("vision_tower.vision_model.", "vision_tower.", 1) if found else None


def find_checkpoint(model: str) -> Path:
    """Return the folder of `model`: the folder itself, or a download of the needed files from the hub.

    Raises:
        StartFailed: neither a folder nor a model that can be fetched.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, allow_patterns=list(_SMALL_FILES)))
        files = sorted({path.name for path in tower_files(folder)} or {_SINGLE})
        return Path(snapshot_download(model, allow_patterns=[*_SMALL_FILES, *files]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = type(error).__name__
        text = f"--model {model}: no such folder, and the model hub does not give it ({reason})"
        raise StartFailed(text) from error


def _weight_map(folder: Path) -> Mapping[str, str] | None:
    index = folder / _INDEX
    if not index.exists():
        return None
    weights: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    return weights


def tower_files(folder: Path) -> set[Path]:
    """Return the weight files that hold tensors of the tower; empty when the folder has no safetensors."""
    weights = _weight_map(folder)
    if weights is None:
        return {folder / _SINGLE} if (folder / _SINGLE).exists() else set()
    return {folder / name for key, name in weights.items() if tower_name(key)}


def checkpoint_identity(folder: Path) -> str:
    """Return a text that changes with the tower's weights, as far as their headers and files tell.

    The file headers (names, shapes, types, places), sizes and times of change are covered, not each byte:
    hashing gigabytes would cost more than loading the tower.
    """
    facts: list[Any] = []
    for path in sorted(tower_files(folder)):
        status = path.stat()
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            facts.append((path.name, status.st_size, status.st_mtime_ns, file.read(min(length, 2**26)).hex()))
    return identity_of((folder / "config.json").read_text(errors="replace"), facts)
