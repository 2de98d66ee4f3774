"""The golden reference: a checkpoint run whole by transformers, without anything of epdctl in it.

Rules of this file: greedy decoding, one request at a time, float32 unless asked otherwise; images enter as
the `data:` URLs of the messages, so that the reference sees the bytes that the system under test is sent.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

PLACEHOLDER, VIDEO_PLACEHOLDER = "<|image_pad|>", "<|video_pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the whole network says: new tokens, with the end token if it came, and their text."""

    token_ids: tuple[int, ...]
    text: str
    prompt_token_ids: tuple[int, ...]


class Reference:
    """One checkpoint, loaded whole."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._image_processor = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True
        )
        self._network = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()

    @torch.no_grad()
    def answer(self, messages: Sequence[dict[str, Any]], max_tokens: int = 64) -> Answer:
        """Answer chat messages whose images are base64 `data:` URLs."""
        seen = self._see(_images(messages))
        ids = torch.tensor([self._prompt_ids(messages, seen)])
        whole = self._network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self._network.config.image_token_id).int(),
            max_new_tokens=max_tokens,
            do_sample=False,
            **seen,
        )
        new = whole[0, ids.shape[1] :].tolist()
        return Answer(
            token_ids=tuple(new),
            text=self._tokenizer.decode(new, skip_special_tokens=True),
            prompt_token_ids=tuple(ids[0].tolist()),
        )

    @torch.no_grad()
    def answer_video(
        self, text: str, patches: torch.Tensor, grid: Sequence[int], max_tokens: int = 32
    ) -> Answer:
        """Answer a text about a video, given as the patches that a video processor makes of it."""
        content = [{"type": "video"}, {"type": "text", "text": text}]
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        rows = grid[0] * grid[1] * grid[2] // self._image_processor.merge_size**2
        prompt = prompt.replace(VIDEO_PLACEHOLDER, VIDEO_PLACEHOLDER * rows)
        ids = torch.tensor([self._tokenizer.encode(prompt, add_special_tokens=False)])
        whole = self._network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=2 * (ids == self._network.config.video_token_id).int(),
            max_new_tokens=max_tokens,
            do_sample=False,
            pixel_values_videos=patches,
            video_grid_thw=torch.tensor([list(grid)]),
        )
        new = whole[0, ids.shape[1] :].tolist()
        return Answer(
            token_ids=tuple(new),
            text=self._tokenizer.decode(new, skip_special_tokens=True),
            prompt_token_ids=tuple(ids[0].tolist()),
        )

    def _see(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        if not images:
            return {}
        seen = self._image_processor(images=list(images), return_tensors="pt")
        return {"pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}

    def _prompt_ids(self, messages: Sequence[dict[str, Any]], seen: dict[str, torch.Tensor]) -> list[int]:
        prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expanded, *pieces = prompt.split(PLACEHOLDER)
        per_token = self._image_processor.merge_size**2
        grids = seen["image_grid_thw"].tolist() if seen else []
        for (frames, rows, columns), piece in zip(grids, pieces, strict=True):
            expanded += PLACEHOLDER * (frames * rows * columns // per_token) + piece
        return list(self._tokenizer.encode(expanded, add_special_tokens=False))


def _images(messages: Sequence[dict[str, Any]]) -> list[Image.Image]:
    return [
        _opened(part["image_url"]["url"])
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def _opened(url: str) -> Image.Image:
    _, encoded = url.split(";base64,", 1)
    with Image.open(io.BytesIO(base64.b64decode(encoded, validate=True))) as image:
        return image.convert("RGB")
