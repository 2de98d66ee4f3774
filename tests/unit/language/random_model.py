"""A Qwen2-VL checkpoint with random weights: nobody trained one, and its answers only have to be the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.e2e.tiny_pictures import QWEN2_5_VL


def write_qwen2_vl(folder: Path, seed: int = 5) -> Path:
    """Write a checkpoint with the tiny checkpoints' tokenizer, template and image processor."""
    for path in QWEN2_5_VL.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder / path.name)
    declared = json.loads((QWEN2_5_VL / "config.json").read_text())
    ids = {name: declared[name] for name in declared if name.endswith("token_id")}
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config=declared["text_config"] | {"model_type": "qwen2_vl_text"},
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(seed)
    network = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            # Wide enough that no two tokens are nearly as likely: a tie would be broken by rounding.
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    network.save_pretrained(folder)
    return folder
