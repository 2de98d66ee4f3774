"""The vision tower: built without its language model, run on batches of items.

    tower = Tower.load(folder, dtype="auto", device="cpu", threads=1)
    tower.width, tower.dtype
    outputs = tower.encode([(pixels, layout), ...])
    outputs.copy_rows(i, target)         # the i-th item's rows into memory, cast on the way
    tower.fence.wait()                   # after the copies: now the host may read them

Here is what all towers have in common; `patch_tower` and `feature_tower` are the two kinds.

Rules of this file: these are the only places of the encode worker that compute with torch. A tower runs on
one thread, the compute thread. Rows of an item are `[rows, width]`; levels of a deepstack tower lie side by
side on the width, the merged output first (vLLM's layout).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from epdctl.errors import EncodeFailed
from epdctl.worker.encode.acceleration import Compile
from epdctl.worker.encode.devices import fence_of, find_device, pin_host_memory
from epdctl.worker.encode.families import NotServed, feature_family
from epdctl.worker.encode.layout import ItemLayout
from epdctl.worker.encode.weights import read_tower
from epdctl.worker.engine import StartFailed
from epdctl.worker.model_folder import unreadable_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What one forward gave: for each item its levels, each `[rows, hidden]`; views, not copied yet."""

    items: tuple[tuple[torch.Tensor, ...], ...]
    dtype: torch.dtype

    def copy_rows(self, index: int, target: memoryview | torch.Tensor) -> None:
        """Copy the rows of item `index` into `target` (exactly their bytes), once, in `dtype`.

        `target` is memory of the host, or a tensor of bytes on any device. A device may still be copying when
        this returns; the tower's fence waits for that.
        """
        levels = self.items[index]
        rows, hidden = levels[0].shape
        table = _elements(target, self.dtype).view(rows, hidden * len(levels))
        for number, level in enumerate(levels):
            # Side by side the target is not contiguous: torch would copy through a buffer of its own, which
            # a device must have filled before it is read.
            place = table[:, number * hidden : (number + 1) * hidden]
            place.copy_(level, non_blocking=len(levels) == 1)


def _elements(target: memoryview | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(target, torch.Tensor):
        return target.view(dtype)
    return torch.frombuffer(target, dtype=dtype)


class Tower(ABC):
    """A loaded vision tower."""

    def __init__(self, module: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._dtype = dtype
        self.fence = fence_of(device)
        self.model_type: str = config.model_type
        self.width = 0

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._device

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
        """Return the tower of the checkpoint in `folder`, after one forward of a blank item.

        Raises:
            StartFailed: not a checkpoint of a kind that is served, damaged, or no such device.
        """
        torch.set_num_threads(threads)
        config = read_config(folder)
        place = find_device(device)
        chosen = _dtype(config, dtype)
        kind = _kind_of(folder, config)
        module = kind.build(config)
        wanted = {plain_name(name): name for name, _ in module.named_parameters()}
        state = {wanted.get(name, name): tensor for name, tensor in read_tower(folder, chosen, place)}
        try:
            module.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            raise StartFailed(f"{folder}: the weights do not fit the tower of {config.model_type}") from error
        module = module.to(place).eval().requires_grad_(False)
        tower = kind(module, config, chosen, place)
        try:
            tower.width = tower.self_test()
        except EncodeFailed as error:
            raise StartFailed(f"{folder}: {error.message}") from error
        return tower

    @staticmethod
    @abstractmethod
    def build(config: Any) -> Any:
        """Return the tower's module with its parameters on the meta device, without a language model."""

    @abstractmethod
    def blank(self, scale: int = 1) -> tuple[torch.Tensor, ItemLayout]:
        """Return a small blank item; with a larger `scale` a larger one, if the tower takes several sizes."""

    @abstractmethod
    def takes(self, layout: ItemLayout) -> bool:
        """Return whether an item of `layout` is one for this tower, with the rows that it would give."""

    @abstractmethod
    def encode(self, items: Sequence[tuple[torch.Tensor, ItemLayout]]) -> Outputs:
        """Run one forward over `items` of one forward group: float32 pixels in the layout's shape.

        Raises:
            EncodeFailed: the tower failed, or gave another number of rows than the layouts say.
        """

    def self_test(self) -> int:
        """Run a blank item and return the width of its rows; raises EncodeFailed."""
        outputs = self.encode([self.blank()])
        self.fence.wait()
        return sum(int(level.shape[1]) for level in outputs.items[0])

    def warm_up(self) -> None:
        """Run blank items of different sizes, alone and together; raises EncodeFailed."""
        for scale in (1, 2, 3):
            self.encode([self.blank(scale)])
            self.encode([self.blank(scale)] * 2)
        self.fence.wait()

    def compile_with(self, backend: Compile) -> None:
        """Hand the tower's graphs to `backend` from the next forward on."""
        self._module.compile(backend=backend, dynamic=True)

    def pin(self, address: int, nbytes: int) -> bool:
        """Let the tower's device copy into that host memory by itself; see `devices`."""
        return pin_host_memory(self._device, address, nbytes)

    def nbytes_of(self, rows: int) -> int:
        """Return the bytes of `rows` embedding rows."""
        return rows * self.width * self.itemsize

    def _placed(self, items: Iterable[tuple[torch.Tensor, ItemLayout]]) -> torch.Tensor:
        """Return the pixels of all items in one tensor of the tower's data type on its device."""
        return torch.cat([pixels for pixels, _ in items]).to(self._device, self._dtype)


def plain_name(name: str) -> str:
    """Return a parameter's name as `read_tower` gives it."""
    return name.replace("vision_tower.vision_model.", "vision_tower.", 1)


def _kind_of(folder: Path, config: Any) -> type[Tower]:
    # The two kinds build on this file.
    from epdctl.worker.encode.feature_tower import FeatureTower
    from epdctl.worker.encode.patch_tower import PatchTower

    try:
        return PatchTower if feature_family(config) is None else FeatureTower
    except NotServed as error:
        raise StartFailed(f"{folder}: {error}") from error


def read_config(folder: Path) -> Any:
    """Return the checkpoint's configuration; raises StartFailed."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise StartFailed(f"--model {unreadable_config(folder, error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise StartFailed(f"{folder}: quantized checkpoints are not served, use the original weights")
    return config


def _dtype(config: Any, asked: str) -> torch.dtype:
    declared = getattr(config, "dtype", None) or getattr(config.vision_config, "dtype", None) or "float32"
    name = str(declared).removeprefix("torch.") if asked == "auto" else asked
    if name not in DTYPES:
        raise StartFailed(f"data type {name} is not served, give --dtype {', '.join(DTYPES)}")
    return DTYPES[name]
