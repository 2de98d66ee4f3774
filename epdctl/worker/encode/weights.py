"""Reads only the vision tower of a checkpoint: language weights are never opened, let alone copied.

Rules of this file: tensors are copied out one at a time, cast while they are copied, so that memory grows by
the tower in its final data type and by nothing else. Files are memory-mapped by safetensors; what is not
touched is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from epdctl.worker.encode.checkpoint import tower_files, tower_name
from epdctl.worker.engine import StartFailed


def read_tower(folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Give each tensor of the tower under the tower's own name, as `dtype` on `device`.

    Raises:
        StartFailed: the folder has no safetensors weights, or they are damaged.
    """
    files = tower_files(folder)
    if not files:
        raise StartFailed(f"{folder}: no safetensors weights found in this folder")
    for path in sorted(files):
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    if (name := tower_name(key)) is not None:
                        # A copy in any case: a view would keep the whole file mapped.
                        yield name, file.get_tensor(key).to(device=device, dtype=dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise StartFailed(f"{path}: cannot be read ({type(error).__name__})") from error
