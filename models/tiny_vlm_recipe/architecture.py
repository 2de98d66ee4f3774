"""Configurations and networks: transformers' own Qwen2-VL, Qwen2.5-VL and Qwen3-VL classes, made small.

Heads are 32 wide in the tower and in the language model, the narrowest that vLLM 0.32's CPU attention takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models.tiny_vlm_recipe.tokenizer import VOCABULARY_SIZE

ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
HEAD_WIDTH = 32
MERGE = 2
_PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
_SECTIONS = {"qwen2_vl": [4, 6, 6], "qwen2_5_vl": [4, 6, 6], "qwen3_vl": [6, 5, 5]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Widths and depths. Raises ValueError where a width does not divide into heads."""

    lm_hidden: int = 64
    lm_layers: int = 3
    vis_hidden: int = 64
    vis_depth: int = 2

    def __post_init__(self) -> None:
        for name, unit in (("lm_hidden", 2 * HEAD_WIDTH), ("vis_hidden", HEAD_WIDTH)):
            value = getattr(self, name)
            if value < unit or value % unit:
                raise ValueError(f"{name} is {value}: it must be a multiple of {unit}")
        if min(self.lm_layers, self.vis_depth) < 1:
            raise ValueError("lm_layers and vis_depth must be at least 1")


def build_config(architecture: str, tokenizer: Any, sizes: Sizes) -> Any:
    """Return the transformers configuration of this architecture, with the tokenizer's special ids in it."""
    kind = {
        "qwen2_vl": transformers.Qwen2VLConfig,
        "qwen2_5_vl": transformers.Qwen2_5_VLConfig,
        "qwen3_vl": transformers.Qwen3VLConfig,
    }[architecture]
    config = kind(
        text_config=_text_config(architecture, tokenizer, sizes),
        vision_config=_vision_config(architecture, sizes),
        tie_word_embeddings=True,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    config.dtype = "float32"
    return config


def build_network(config: Any, seed: int) -> Any:
    """Return the network with weights drawn from the seed; it changes torch's global generator.

    A network this small needs more than the usual 0.02: matrices get a deviation of 1/sqrt(fan in).
    """
    torch.manual_seed(seed)
    network = transformers.AutoModelForImageTextToText.from_config(config)
    embedding = network.get_input_embeddings().weight
    for parameter in network.parameters():
        if parameter.dim() >= 2 and parameter is not embedding:
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
    torch.nn.init.normal_(embedding, std=0.08)
    return network


def build_image_processor(architecture: str) -> Any:
    """Return Qwen's image processor, bounded so that a picture gives 9 to 36 language model tokens."""
    unit = _PATCH[architecture] * MERGE
    options: dict[str, Any] = {"patch_size": _PATCH[architecture], "size": pixel_bounds(unit)}
    if architecture == "qwen3_vl":
        options |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    return Qwen2VLImageProcessorPil(**options)


def pixel_bounds(unit: int) -> dict[str, int]:
    """Return the fewest and the most pixels of a picture, whose tokens cover `unit` x `unit` pixels each."""
    return {"shortest_edge": (3 * unit) ** 2, "longest_edge": (6 * unit) ** 2}


def _text_config(architecture: str, tokenizer: Any, sizes: Sizes) -> dict[str, Any]:
    width = sizes.lm_hidden
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": _SECTIONS[architecture],
    }
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": sizes.lm_layers,
        "num_attention_heads": width // HEAD_WIDTH,
        "num_key_value_heads": width // (2 * HEAD_WIDTH),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if architecture == "qwen3_vl":
        text["head_dim"] = HEAD_WIDTH
        rope["mrope_interleaved"] = True
    return text


def _vision_config(architecture: str, sizes: Sizes) -> dict[str, Any]:
    width, depth = sizes.vis_hidden, sizes.vis_depth
    common = {
        "depth": depth,
        "num_heads": width // HEAD_WIDTH,
        "patch_size": _PATCH[architecture],
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    if architecture == "qwen2_vl":
        return common | {
            "embed_dim": width,
            "hidden_size": sizes.lm_hidden,
            "mlp_ratio": 2,
            "hidden_act": "quick_gelu",
        }
    common |= {"hidden_size": width, "intermediate_size": 2 * width, "out_hidden_size": sizes.lm_hidden}
    if architecture == "qwen3_vl":
        return common | {
            "num_position_embeddings": 144,
            "deepstack_visual_indexes": [0],
            "hidden_act": "gelu_pytorch_tanh",
        }
    return common | {
        "window_size": 112,
        "fullatt_block_indexes": [depth - 1],
        "tokens_per_second": 2,
        "hidden_act": "silu",
    }
