"""Checkpoints with random weights, written by the benchmark itself, and pictures to encode.

Rules of this file: torch is imported only where a checkpoint is written. Pictures are noise from a seed, so
that two processes can make the same ones.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-vlm" / "qwen2_5_vl"
TINY_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen2.5-VL with a tower of `depth` layers of `hidden`, and a language model of `language_layers`."""

    hidden: int = 1280
    depth: int = 2
    language_layers: int = 4
    language_hidden: int = 2048


def _config(shape: Shape) -> Any:
    from transformers import Qwen2_5_VLConfig

    vision = {
        "depth": shape.depth,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.hidden * 8 // 3,
        "num_heads": max(1, shape.hidden // 80),
        "out_hidden_size": shape.language_hidden,
        "fullatt_block_indexes": [shape.depth - 1],
    }
    heads = max(2, shape.language_hidden // 128)
    text = {
        "hidden_size": shape.language_hidden,
        "intermediate_size": 3 * shape.language_hidden,
        "num_hidden_layers": shape.language_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, dtype="bfloat16")


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Write one in bfloat16: random weights in the tower, zeros in the language model."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    config = _config(shape)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        network = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(0)
    weights = {
        name: _weight(torch, name, parameter.shape, random) for name, parameter in network.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    processor = json.loads((TINY / "preprocessor_config.json").read_text())
    processor["size"] = {"shortest_edge": 56 * 56, "longest_edge": 2048 * 2048}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _weight(torch: Any, name: str, size: Any, random: Any) -> Any:
    if "visual." not in name:
        return torch.zeros(size, dtype=torch.bfloat16)
    if name.endswith(("norm1.weight", "norm2.weight", "ln_q.weight")):
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size).normal_(std=0.02, generator=random).to(torch.bfloat16)


def picture(seed: int, side: int) -> bytes:
    """Return a PNG of noise, `side` x `side`."""
    noise = numpy.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=numpy.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG", compress_level=1)
    return out.getvalue()


def data_url(data: bytes) -> str:
    """Return a PNG as a `data:` URL."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
