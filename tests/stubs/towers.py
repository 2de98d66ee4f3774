"""Tiny random checkpoints of every family of towers, in several shards, as transformers writes them.

Rules of this file: random weights from a fixed seed, so that rows differ between pictures; a language model
is there because a real checkpoint has one, and is never run.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_siglip", "llava_next", "gemma3")
_TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
_TILES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_MROPE = {"rope_scaling": {"type": "default", "mrope_section": [4, 4, 4]}}


def _config(family: str) -> Any:
    clip = transformers.CLIPVisionConfig(**_TILES)
    siglip = transformers.SiglipVisionConfig(**_TILES, vision_use_head=False)
    text = transformers.LlamaConfig(**_TEXT)
    match family:
        case "qwen2_vl":
            vision = {"depth": 2, "embed_dim": 64, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2}
            return transformers.Qwen2VLConfig(text_config={**_TEXT, **_MROPE}, vision_config=vision)
        case "qwen2_5_vl":
            vision = {"depth": 2, "hidden_size": 64, "out_hidden_size": 48, "num_heads": 2}
            vision |= {"intermediate_size": 96, "fullatt_block_indexes": [1]}
            return transformers.Qwen2_5_VLConfig(text_config={**_TEXT, **_MROPE}, vision_config=vision)
        case "qwen3_vl":
            vision = {"depth": 3, "hidden_size": 64, "out_hidden_size": 48, "num_heads": 2}
            vision |= {"intermediate_size": 96, "deepstack_visual_indexes": [0, 1]}
            rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}
            text_config = {**_TEXT, "head_dim": 24, "rope_scaling": rope}
            return transformers.Qwen3VLConfig(text_config=text_config, vision_config=vision)
        case "llava":
            return transformers.LlavaConfig(vision_config=clip, text_config=text)
        case "llava_siglip":
            strategy = {"vision_feature_select_strategy": "full"}
            return transformers.LlavaConfig(vision_config=siglip, text_config=text, **strategy)
        case "llava_next":
            grids = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
            return transformers.LlavaNextConfig(
                vision_config=clip, text_config=text, image_grid_pinpoints=grids
            )
        case _:
            gemma = transformers.Gemma3TextConfig(**_TEXT, head_dim=24)
            return transformers.Gemma3Config(vision_config=siglip, text_config=gemma, mm_tokens_per_image=4)


def _processor(family: str, config: Any) -> Any:
    tile = {"height": 56, "width": 56}
    match family:
        case "llava":
            return transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=tile)
        case "llava_siglip":
            return transformers.SiglipImageProcessorPil(size=tile)
        case "llava_next":
            grids = config.image_grid_pinpoints
            return transformers.LlavaNextImageProcessorPil(
                size={"shortest_edge": 56}, crop_size=tile, image_grid_pinpoints=grids
            )
        case "gemma3":
            return transformers.Gemma3ImageProcessorPil(size=tile)
        case _:
            size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
            patch = config.vision_config.patch_size
            return transformers.Qwen2VLImageProcessorPil(size=size, patch_size=patch)


def write_tower_checkpoint(folder: Path, family: str) -> None:
    """Write the tiny random checkpoint of `family` in shards of at most 40 KB."""
    config = _config(family)
    torch.manual_seed(11)
    network = transformers.AutoModelForImageTextToText.from_config(config).float()
    with torch.no_grad():
        for parameter in network.model.parameters():
            # Flat parameters such as scales of norms keep their shape around 1, so that nothing vanishes.
            spread = 1.0 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * spread)
    network.save_pretrained(folder, max_shard_size="40KB")
    _processor(family, config).save_pretrained(folder)


def tower_pictures() -> list[bytes]:
    """Return PNGs of several sizes and shapes."""
    found = []
    for number, size in enumerate([(56, 56), (140, 84), (60, 200), (112, 112), (90, 70)]):
        noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(number))
        out = io.BytesIO()
        Image.fromarray(noise.to(torch.uint8).numpy()).save(out, "PNG")
        found.append(out.getvalue())
    return found


class WholeModel:
    """The same checkpoint, loaded whole by transformers."""

    def __init__(self, folder: Path) -> None:
        self.network: Any = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self._processor: Any = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True
        )

    @torch.no_grad()
    def rows(self, data: bytes) -> torch.Tensor:
        """Return the rows of a picture; deepstack levels side by side."""
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        seen = self._processor(images=[picture], return_tensors="pt")
        names = {"pixel_values", "image_grid_thw", "image_sizes"} & set(seen)
        out = self.network.model.get_image_features(**{name: seen[name] for name in names})
        levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        return torch.cat([torch.cat(list(level)) for level in levels], dim=1)
