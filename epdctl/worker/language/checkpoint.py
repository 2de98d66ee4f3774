"""What a checkpoint says about itself: shapes, special tokens, and which tensors are the language model's.

Rules of this file: the only reader of a checkpoint's configuration and of its index; no weight is read here.
What is not supported is refused by name, before anything is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epdctl.worker.language.spec import DTYPE_BYTES, ModelSpec
from epdctl.worker.model_folder import unreadable_config

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

# Released checkpoints spell the same tensor in three ways: `model.layers.`, `language_model.model.layers.`
# (older exports) and `model.language_model.layers.` (transformers from 4.52 on). The head is
# `lm_head.weight`, alone or under `language_model.`.
_TEXT_KEY = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.|model\.)(?=embed_tokens\.|layers\.|norm\.)"
)
_HEAD_KEY = re.compile(r"(?:language_model\.)?lm_head\.weight\Z")
HEAD = "lm_head.weight"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_VIDEO_FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Qwen3-VL writes each frame's time into the prompt, which this worker does not."""
_SMALL_FILES = ("*.json", "*.jinja", "*.txt")


class UnsupportedCheckpoint(Exception):
    """The checkpoint cannot be served by this worker; the text says why and what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder with its configuration object (transformers') and the facts taken from it."""

    folder: Path
    config: Any
    spec: ModelSpec


def open_checkpoint(model: str, dtype: str) -> Checkpoint:
    """Return the checkpoint `model`, a folder or a hub name; `dtype` is "auto" or a torch dtype name.

    Raises:
        UnsupportedCheckpoint: it is not there, or of a kind this worker does not serve.
    """
    folder = find_checkpoint(model)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedCheckpoint(unreadable_config(folder, error)) from error
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedCheckpoint(f"{model}: model type {config.model_type} is not one of {known}")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedCheckpoint(
            f"{model}: quantized checkpoints are not served, use the original weights"
        )
    return Checkpoint(folder=folder, config=config, spec=_spec(config, dtype, _eos_ids(folder, config)))


def find_checkpoint(model: str) -> Path:
    """Return the folder of `model`: itself, or a download of the files that the language model needs.

    Raises:
        UnsupportedCheckpoint: it is neither a folder nor a model that the hub gives us.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, allow_patterns=list(_SMALL_FILES)))
        names = [path.name for path in language_tensors(folder)] if (folder / _INDEX).exists() else [_SINGLE]
        return Path(snapshot_download(model, allow_patterns=[*_SMALL_FILES, *names]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = type(error).__name__
        raise UnsupportedCheckpoint(f"{model}: no such folder, and no hub gives it ({reason})") from error


def declared_max_positions(folder: Path) -> int | None:
    """Return how many tokens the model is made for, as its config.json says, without loading anything."""
    try:
        declared = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    for part in (declared.get("text_config") or {}, declared):
        if isinstance(part.get("max_position_embeddings"), int):
            return int(part["max_position_embeddings"])
    return None


def _spec(config: Any, dtype: str, eos: tuple[int, ...]) -> ModelSpec:
    text = config.get_text_config()
    heads = text.num_attention_heads
    levels = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    name = _dtype_name(config, text) if dtype == "auto" else dtype
    if name not in DTYPE_BYTES:
        raise UnsupportedCheckpoint(f"dtype {name} is not served, give --dtype {', '.join(DTYPE_BYTES)}")
    return ModelSpec(
        family=config.model_type,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        dtype=name,
        levels=len(levels),
        merge=config.vision_config.spatial_merge_size,
        image_token_id=config.image_token_id,
        eos_token_ids=eos,
        video_token_id=config.video_token_id if config.model_type in _VIDEO_FAMILIES else None,
        frame_step=float(getattr(config.vision_config, "tokens_per_second", 1)),
    )


def _dtype_name(config: Any, text: Any) -> str:
    declared = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    return str(declared).removeprefix("torch.")


def _eos_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """Return the ids that end a text: the generation configuration's, else the model configuration's."""
    path = folder / "generation_config.json"
    declared = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
    if declared is None:
        declared = config.get_text_config().eos_token_id
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list) else (int(declared),)


def language_tensors(folder: Path) -> Mapping[Path, Mapping[str, str]]:
    """Return, for each weight file, the language model's tensors in it: key in the file -> parameter's name.

    Parameter names are those of transformers' text model, and HEAD.

    Raises:
        UnsupportedCheckpoint: the folder has no safetensors weights.
    """
    found: dict[Path, dict[str, str]] = {}
    for key, path in _tensor_files(folder).items():
        name = _parameter_name(key)
        if name is not None:
            found.setdefault(path, {})[key] = name
    return found


def _parameter_name(key: str) -> str | None:
    if _HEAD_KEY.match(key):
        return HEAD
    prefix = _TEXT_KEY.match(key)
    return key[prefix.end() :] if prefix else None


def _tensor_files(folder: Path) -> Mapping[str, Path]:
    index, single = folder / _INDEX, folder / _SINGLE
    if index.exists():
        weights: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        return {key: folder / name for key, name in weights.items()}
    if not single.exists():
        raise UnsupportedCheckpoint(f"{folder.name}: no safetensors weights found in the folder")
    from safetensors import safe_open

    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)
