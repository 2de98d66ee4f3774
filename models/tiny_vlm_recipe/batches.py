"""Samples become the tensors that a Qwen-VL network takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.tiny_vlm_recipe.pictures import Picture
from models.tiny_vlm_recipe.questions import Sample
from models.tiny_vlm_recipe.tokenizer import END_OF_TURN, IMAGE_PLACEHOLDER

UNLABELLED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """Patches of all pictures of a batch, one picture after another.

    `values` is [patches, 3 * 2 * patch * patch] float32; `grids` is [pictures, 3] int64: frames, rows and
    columns of patches.
    """

    values: torch.Tensor
    grids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows padded on the right.

    `ids`, `attention`, `picture_mask` (1 at placeholders) and `labels` are [rows, length]; `labels` holds the
    answer and the end of turn, and UNLABELLED elsewhere. `pixels` is None without pictures.
    """

    ids: torch.Tensor
    attention: torch.Tensor
    picture_mask: torch.Tensor
    labels: torch.Tensor
    pixels: Pixels | None

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of a forward call, without pixels."""
        named = {
            "input_ids": self.ids,
            "attention_mask": self.attention,
            "mm_token_type_ids": self.picture_mask,
        }
        return named if self.pixels is None else named | {"image_grid_thw": self.pixels.grids}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Turns samples into a batch by one tokenizer and one image processor."""

    tokenizer: Any
    image_processor: Any

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the batch of these samples, prompts and answers both in it."""
        pictures = [picture for sample in samples for picture in sample.pictures]
        pixels = self.pixels(pictures) if pictures else None
        counts = iter(self.token_counts(pixels) if pixels else [])
        rows = [
            (self.prompt_ids(sample, [next(counts) for _ in sample.pictures]), self._answer_ids(sample))
            for sample in samples
        ]
        ids, attention, labels = self._pad(rows)
        is_placeholder = ids == self.tokenizer.convert_tokens_to_ids(IMAGE_PLACEHOLDER)
        return Batch(
            ids=ids, attention=attention, labels=labels, picture_mask=is_placeholder.int(), pixels=pixels
        )

    def pixels(self, pictures: Sequence[Picture]) -> Pixels:
        """Return the patches of these pictures, at least one."""
        processed = [self.image_processor(images=[one.image], return_tensors="pt") for one in pictures]
        return Pixels(
            values=torch.cat([one["pixel_values"] for one in processed]),
            grids=torch.cat([one["image_grid_thw"] for one in processed]),
        )

    def token_counts(self, pixels: Pixels) -> list[int]:
        """Return how many language model tokens each picture takes."""
        return [int(count) for count in pixels.grids.prod(dim=1) // self.image_processor.merge_size**2]

    def prompt_ids(self, sample: Sample, token_counts: Sequence[int]) -> list[int]:
        """Return the chat prompt with each picture's placeholder repeated to its number of tokens."""
        before, *pieces = self._prompt(sample).split(IMAGE_PLACEHOLDER)
        for count, piece in zip(token_counts, pieces, strict=True):
            before += IMAGE_PLACEHOLDER * count + piece
        return list(self.tokenizer.encode(before, add_special_tokens=False))

    def _prompt(self, sample: Sample) -> str:
        content: list[dict[str, str]] = [{"type": "image"} for _ in sample.pictures]
        content.insert(
            0 if sample.question_first else len(content), {"type": "text", "text": sample.question}
        )
        prompt: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return prompt

    def _answer_ids(self, sample: Sample) -> list[int]:
        return list(self.tokenizer.encode(sample.answer + END_OF_TURN, add_special_tokens=False))

    def _pad(
        self, rows: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (len(rows), max(len(prompt) + len(answer) for prompt, answer in rows))
        ids = torch.full(shape, self.tokenizer.pad_token_id, dtype=torch.long)
        attention = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, UNLABELLED, dtype=torch.long)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            attention[row, :end] = 1
            labels[row, len(prompt) : end] = torch.tensor(answer)
        return ids, attention, labels
