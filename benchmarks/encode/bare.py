"""The same tower without a worker round it, led by JSON lines on standard input.

    python -m benchmarks.encode.bare tower FOLDER [THREADS [DEVICE]]    # the tower, then batches on request
    python -m benchmarks.encode.bare whole FOLDER                       # the whole model

Each prints one line when it is loaded (`{"rss": bytes, "anonymous": bytes}`). To
`{"seeds": [..], "side": 112, "batch": 16}` the first one answers `{"seconds", "cpu"}` of the
forwards alone: pictures are decoded, resized and cut before the clock starts.

Rules of this file: transformers and torch, nothing of epdctl.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def memory() -> dict[str, int]:
    """Return the resident bytes of this process, and those that no file backs."""
    status = Path("/proc/self/status").read_text()
    found = {name: int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) for name in ("VmRSS", "RssAnon")}  # type: ignore[index]
    return {"rss": found["VmRSS"] * 1024, "anonymous": found["RssAnon"] * 1024}


def say(answer: dict[str, Any]) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def load_whole(folder: str) -> Any:
    """Load the whole model and its image processor, as one does with transformers."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    AutoImageProcessor.from_pretrained(folder, backend="pil")
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


class BareTower:
    """The tower of a Qwen2.5-VL checkpoint and its image processor."""

    def __init__(self, folder: str, threads: int, device: str = "cpu") -> None:
        import torch
        from safetensors import safe_open
        from transformers import AutoConfig, AutoImageProcessor
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

        torch.set_num_threads(threads)
        config: Any = AutoConfig.from_pretrained(folder)
        config.vision_config._attn_implementation = "sdpa"
        module = modeling.Qwen2_5_VisionTransformerPretrainedModel(config.vision_config)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            names = [name for name in file.keys() if "visual." in name]  # noqa: SIM118
            module.load_state_dict({name.split("visual.")[1]: file.get_tensor(name) for name in names})
        self._torch = torch
        self._device = device
        self._module = module.to(device, torch.float32).eval()
        self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def prepare(self, seeds: Sequence[int], side: int, batch: int) -> list[tuple[Any, Any]]:
        """Return pixels and grids of each batch."""
        from PIL import Image

        from benchmarks.encode.checkpoint import picture

        images = [Image.open(io.BytesIO(picture(seed, side))).convert("RGB") for seed in seeds]
        outs = (self._processor(images=some, return_tensors="pt") for some in _batches(images, batch))
        return [(out["pixel_values"], out["image_grid_thw"]) for out in outs]

    def run(self, batches: Sequence[tuple[Any, Any]]) -> float:
        """Run the tower over the batches; return the seconds until the rows are in host memory."""
        began = time.perf_counter()
        with self._torch.inference_mode():
            for pixels, grids in batches:
                out = self._module(pixels.to(self._device), grid_thw=grids.to(self._device))
                out.pooler_output.to("cpu")
        return time.perf_counter() - began


def _batches(images: list[Any], batch: int) -> Iterator[list[Any]]:
    for at in range(0, len(images), batch):
        yield images[at : at + batch]


def serve_tower(folder: str, threads: int, device: str) -> None:
    """Load the tower and run batches until standard input ends."""
    tower = BareTower(folder, threads, device)
    tower.run(tower.prepare([0], 56, 1))
    say(memory())
    for line in sys.stdin:
        wanted = json.loads(line)
        batches = tower.prepare(wanted["seeds"], wanted["side"], wanted["batch"])
        cpu = time.process_time()
        seconds = tower.run(batches)
        say({"seconds": seconds, "cpu": time.process_time() - cpu})


def main() -> None:
    """Load what is asked for, and serve."""
    kind, folder, *rest = sys.argv[1:]
    if kind == "tower":
        serve_tower(folder, int(rest[0]) if rest else 1, rest[1] if len(rest) > 1 else "cpu")
    else:
        kept = load_whole(folder)
        say(memory())
        sys.stdin.read()
        del kept


if __name__ == "__main__":
    main()
