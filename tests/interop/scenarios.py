"""The requests that every deployment answers, and what of them must come true.

Rules of this file: pure but for drawing; a deployment's pictures are its own (same bytes every run), so
that nothing it is asked was cached by an earlier one."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.tiny_vlm_recipe.pictures import TEST_SEEDS, draw_picture
from tests.interop.engines import MODEL_NAME

ONE = "What is the color of the image?"
SEVERAL = "What are the colors?"
Part = dict[str, Any]
MediaUrl = Callable[[str], str]

NAMES = (
    "one_image",
    "two_images",
    "no_image",
    "stream",
    "malformed_image",
    "processor_options",
    "client_uuid",
    "client_uuid_and_options",
    "http_image",
    "same_image_twice",
    "two_turns",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One request. `images` counts the media parts; `refused` means the answer is a 4xx."""

    name: str
    body: dict[str, Any]
    images: int
    refused: bool = False
    distinct: int = field(default=-1)

    @property
    def distinct_images(self) -> int:
        """How many different embeddings the request needs."""
        return self.images if self.distinct < 0 else self.distinct


def picture_bytes(deployment: str, index: int) -> bytes:
    """Return the PNG of a deployment's picture number `index`."""
    seed = TEST_SEEDS + 100 * (zlib.crc32(deployment.encode()) % 1_000_000) + index
    packed = io.BytesIO()
    draw_picture(seed).image.save(packed, "PNG")
    return packed.getvalue()


def data_url(content: bytes) -> str:
    """Return `content` as the data URL of a PNG."""
    return "data:image/png;base64," + base64.b64encode(content).decode()


def image_part(url: str, **fields: str) -> Part:
    """Return a content part with an image."""
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def text_part(text: str) -> Part:
    """Return a content part with text."""
    return {"type": "text", "text": text}


def chat(*content: Part, **fields: Any) -> dict[str, Any]:
    """Return a greedy chat request with one user message."""
    return conversation({"role": "user", "content": list(content)}, **fields)


def conversation(*messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a greedy chat request; log-probabilities are asked for because they name the tokens."""
    fixed = {"temperature": 0, "max_tokens": 16, "logprobs": True}
    return {"model": MODEL_NAME, "messages": list(messages), **fixed, **fields}


def scenarios(deployment: str, media_url: MediaUrl) -> dict[str, Scenario]:
    """Return the requests for `deployment` by name; `media_url` gives the URL of a served picture."""

    def image(index: int, **fields: str) -> Part:
        return image_part(data_url(picture_bytes(deployment, index)), **fields)

    options = {"mm_processor_kwargs": {"max_pixels": 12544}}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    uuid = f"uuid-of-{deployment}"
    turns = (
        {"role": "user", "content": [image(8), text_part(ONE)]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [image(9), text_part(SEVERAL)]},
    )
    found = (
        Scenario(name="one_image", images=1, body=chat(image(0), text_part(ONE))),
        Scenario(name="two_images", images=2, body=chat(image(1), image(2), text_part(SEVERAL))),
        Scenario(name="no_image", images=0, body=chat(text_part(ONE))),
        Scenario(name="stream", images=1, body=chat(image(3), text_part(ONE), **stream)),
        Scenario(
            name="malformed_image",
            images=1,
            refused=True,
            body=chat(image_part(data_url(picture_bytes(deployment, 4)[:200])), text_part(ONE)),
        ),
        Scenario(name="processor_options", images=1, body=chat(image(5), text_part(ONE), **options)),
        Scenario(name="client_uuid", images=1, body=chat(image(6, uuid=uuid), text_part(ONE))),
        Scenario(
            name="client_uuid_and_options",
            images=1,
            body=chat(image(10, uuid=uuid + "-2"), text_part(ONE), **options),
        ),
        Scenario(
            name="http_image", images=1, body=chat(image_part(media_url(f"{deployment}-7")), text_part(ONE))
        ),
        Scenario(
            name="same_image_twice",
            images=2,
            distinct=1,
            body=chat(image(11), image(11), text_part(SEVERAL)),
        ),
        Scenario(name="two_turns", images=2, body=conversation(*turns)),
    )
    assert tuple(scenario.name for scenario in found) == NAMES
    return {scenario.name: scenario for scenario in found}
