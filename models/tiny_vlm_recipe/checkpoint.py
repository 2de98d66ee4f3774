"""Checkpoint folders as transformers and vLLM expect them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from models.tiny_vlm_recipe.architecture import (
    MERGE,
    Sizes,
    build_config,
    build_image_processor,
    build_network,
    pixel_bounds,
)
from models.tiny_vlm_recipe.tokenizer import END_OF_TEXT, END_OF_TURN, build_tokenizer
from models.tiny_vlm_recipe.training import Trained

_PROCESSORS = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}


def draw_random(architecture: str, sizes: Sizes, seed: int) -> Trained:
    """Return an untrained network of any size with the tokenizer and image processor of the trained ones."""
    tokenizer = build_tokenizer()
    network = build_network(build_config(architecture, tokenizer, sizes), seed)
    image_processor = build_image_processor(architecture)
    return Trained(network=network, tokenizer=tokenizer, image_processor=image_processor)


def save(trained: Trained, folder: Path, *, dtype: str = "float32", shard_bytes: int | None = None) -> None:
    """Write the checkpoint; files of the same names are replaced.

    With `shard_bytes` the weights are split over files of at most that size, with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network, tokenizer = trained.network, trained.tokenizer
    network.generation_config.update(
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TURN, END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        do_sample=False,
    )
    limit = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    network.to(getattr(torch, dtype)).save_pretrained(folder, **limit)
    tokenizer.save_pretrained(folder)
    trained.image_processor.save_pretrained(folder)
    _name_processors(folder, network.config)


def load(folder: Path) -> Trained:
    """Read a checkpoint whole, in float32, from the disk alone."""
    network = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    return Trained(
        network=network.eval(),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True),
        image_processor=transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True
        ),
    )


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _name_processors(folder: Path, config: Any) -> None:
    """Add what AutoProcessor looks for when vLLM calls it: the processor's class, and bounds for video."""
    processor, video_processor = _PROCESSORS[config.model_type]
    image_file = folder / "preprocessor_config.json"
    image = json.loads(image_file.read_text()) | {"processor_class": processor}
    _write_json(image_file, image)
    unit = config.vision_config.patch_size * MERGE
    shared = {key: value for key, value in image.items() if key != "image_processor_type"}
    video = {"video_processor_type": video_processor, "size": pixel_bounds(unit)}
    _write_json(folder / "video_preprocessor_config.json", shared | video)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
