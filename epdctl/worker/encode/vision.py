"""The vision tower: built without its language model, run on batches of pictures.

    tower = Tower.load(folder, dtype="auto", device="cpu", threads=1)
    tower.width, tower.dtype
    outputs = tower.encode([(pixels, layout), ...])
    outputs.copy_rows(i, target)         # the i-th picture's rows into memory, cast on the way

Rules of this file: the only place of the encode worker that computes with torch. It runs on one thread, the
compute thread. Rows of a picture are `[t*h*w / merge^2, width]`; levels of a deepstack tower lie side by
side on the width, the merged output first (vLLM's layout).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig

from epdctl.errors import EncodeFailed
from epdctl.worker.encode.layout import PATCHES, ItemLayout
from epdctl.worker.encode.weights import read_tower
from epdctl.worker.engine import StartFailed

TOWERS = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What one forward gave: per level a tensor `[all rows, hidden]`, and the rows of each picture."""

    levels: tuple[torch.Tensor, ...]
    rows: tuple[int, ...]
    dtype: torch.dtype

    def copy_rows(self, index: int, target: memoryview) -> None:
        """Copy the rows of picture `index` into `target` (exactly their bytes), once, in `dtype`."""
        start = sum(self.rows[:index])
        hidden = self.levels[0].shape[1]
        shape = (self.rows[index], hidden * len(self.levels))
        table = torch.frombuffer(target, dtype=self.dtype).view(shape)
        for number, level in enumerate(self.levels):
            table[:, number * hidden : (number + 1) * hidden].copy_(level[start : start + self.rows[index]])


class Tower:
    """A loaded vision tower."""

    def __init__(self, module: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._dtype = dtype
        vision = config.vision_config
        self.model_type: str = config.model_type
        self.merge: int = vision.spatial_merge_size
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        self.patch_elements: int = channels * vision.temporal_patch_size * vision.patch_size**2
        self.width = 0

    @property
    def dtype(self) -> str:
        """The data type of the rows, a torch name without prefix."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def itemsize(self) -> int:
        """Bytes of one element of a row."""
        return self._dtype.itemsize

    @property
    def parameter_names(self) -> list[str]:
        """Names of every parameter this process holds."""
        return [name for name, _ in self._module.named_parameters()]

    @classmethod
    def load(cls, folder: Path, *, dtype: str, device: str, threads: int) -> Tower:
        """Return the tower of the checkpoint in `folder`, after one forward of a blank picture.

        Raises:
            StartFailed: not a checkpoint of a kind that is served, damaged, or no such device.
        """
        torch.set_num_threads(threads)
        config = _config(folder)
        place = _device(device)
        chosen = _dtype(config, dtype)
        module = _build(config)
        state = dict(read_tower(folder, chosen, place))
        try:
            module.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            raise StartFailed(f"{folder}: the weights do not fit the tower of {config.model_type}") from error
        module = module.to(place).eval().requires_grad_(False)
        tower = cls(module, config, chosen, place)
        tower.width = tower.self_test()
        return tower

    def self_test(self) -> int:
        """Run a blank picture and return the width of its rows; raises EncodeFailed."""
        side = 2 * self.merge
        blank = torch.zeros(side * side, self.patch_elements)
        layout = ItemLayout(rows=4, pixel_shape=blank.shape, forward_group=PATCHES, geometry=(1, side, side))
        outputs = self.encode([(blank, layout)])
        return sum(level.shape[1] for level in outputs.levels)

    def nbytes_of(self, rows: int) -> int:
        """Return the bytes of `rows` embedding rows."""
        return rows * self.width * self.itemsize

    def takes(self, layout: ItemLayout) -> bool:
        """Return whether an item of `layout` is one for this tower, with the rows that it would give."""
        if layout.forward_group != PATCHES or len(layout.geometry) != 3 or min(layout.geometry) < 1:
            return False
        time, height, width = layout.geometry
        patches = time * height * width
        return (
            height % self.merge == 0
            and width % self.merge == 0
            and layout.pixel_shape == (patches, self.patch_elements)
            and layout.rows == patches // self.merge**2
        )

    def encode(self, items: Sequence[tuple[torch.Tensor, ItemLayout]]) -> Outputs:
        """Run one forward over `items`: float patches `[t*h*w, patch_elements]`, (t, h, w) as geometry.

        Raises:
            EncodeFailed: the tower failed, or gave another number of rows than the grids say.
        """
        rows = tuple(layout.rows for _, layout in items)
        pixels = torch.cat([patches for patches, _ in items]).to(self._device, self._dtype)
        grids = torch.tensor([layout.geometry for _, layout in items], device=self._device)
        try:
            with torch.inference_mode():
                out = self._module(pixels, grid_thw=grids)
        except (RuntimeError, ValueError, IndexError) as error:
            raise EncodeFailed("the vision tower failed on this item") from error
        levels = (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))
        for level in levels:
            if level.shape[0] != sum(rows):
                text = f"the vision tower gave {level.shape[0]} rows where the grids ask for {sum(rows)}"
                raise EncodeFailed(text)
        return Outputs(levels=levels, rows=rows, dtype=self._dtype)


def _config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise StartFailed(f"{folder}: config.json cannot be read ({type(error).__name__})") from error
    if config.model_type not in TOWERS:
        served = ", ".join(TOWERS)
        raise StartFailed(f"{folder}: model type '{config.model_type}' is not served (served: {served})")
    if getattr(config, "quantization_config", None) is not None:
        raise StartFailed(f"{folder}: quantized checkpoints are not served, use the original weights")
    return config


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise StartFailed(f"--device {name}: no such device for this build of torch") from error
    return device


def _dtype(config: Any, asked: str) -> torch.dtype:
    declared = getattr(config, "dtype", None) or getattr(config.vision_config, "dtype", None) or "float32"
    name = str(declared).removeprefix("torch.") if asked == "auto" else asked
    if name not in DTYPES:
        raise StartFailed(f"data type {name} is not served, give --dtype {', '.join(DTYPES)}")
    return DTYPES[name]


def _build(config: Any) -> Any:
    package = f"transformers.models.{config.model_type}.modeling_{config.model_type}"
    kind = getattr(importlib.import_module(package), TOWERS[config.model_type])
    config.vision_config._attn_implementation = "sdpa"
    # Parameters on meta until their weights are assigned; buffers are real, some are in no checkpoint.
    with init_empty_weights(include_buffers=False):
        return kind(config.vision_config)
