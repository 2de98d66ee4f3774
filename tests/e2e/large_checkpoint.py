"""Writes a checkpoint of any size with a small vision tower, and measures what loading the tower costs.

    python -m tests.e2e.large_checkpoint measure FOLDER      # prints one JSON line

Rules of this file: weights are zeros of the right names and shapes; nothing is trained. Measuring happens in
a process of its own, from after the imports to after the load.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

TOWER = re.compile(r"(model\.)?(visual\.|(?=vision_tower\.|multi_modal_projector\.))")


def config_of(family: str, language_mb: int) -> Any:
    """Return a configuration of `family` with a small tower and a language model of that size."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2_5_VLConfig

    layers = max(1, language_mb // 28)
    text = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 2048,
        "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]},
    }
    if family == "llava":
        del text["rope_scaling"]
        tiles = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
        clip = CLIPVisionConfig(**tiles, num_hidden_layers=3, image_size=56, patch_size=14)
        return LlavaConfig(vision_config=clip, text_config=LlamaConfig(**text), dtype="bfloat16")
    vision = {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": 1024,
        "fullatt_block_indexes": [3],
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, dtype="bfloat16")


def write_checkpoint(folder: Path, language_mb: int, family: str = "qwen2_5_vl") -> tuple[int, int]:
    """Write one with `language_mb` of bfloat16 language weights; return the bytes of all and of the tower."""
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    config = config_of(family, language_mb)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        network = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    assert any(map(TOWER.match, shapes))
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {name: weight.nbytes for name, weight in weights.items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if TOWER.match(name))


def anonymous_bytes() -> int:
    """Return RssAnon of this process: memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]


def measure(folder: Path) -> dict[str, Any]:
    """Load the tower in float32 and return how RssAnon grew, and the names of the parameters held."""
    from transformers.models.clip import modeling_clip  # noqa: F401
    from transformers.models.llava import modeling_llava  # noqa: F401
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl  # noqa: F401

    from epdctl.worker.encode.vision import Tower

    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = anonymous_bytes()
    tower = Tower.load(folder, dtype="float32", device="cpu", threads=1)
    return {"grown": anonymous_bytes() - before, "names": tower.parameter_names, "width": tower.width}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Path(sys.argv[2]))) + "\n")
