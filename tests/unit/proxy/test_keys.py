"""What identifies a media item."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.proxy.keys import digest, key_material
from tests.unit.proxy.build import LONG_URL, chat, image, text, user

pytestmark = pytest.mark.unit

OTHER_URL = LONG_URL[:-1] + "B"


def key(body: dict[str, Any], index: int = 0) -> str:
    """Return the digest of an item of a chat request."""
    request = chat(body)
    return digest(key_material(request, request.items[index]))


def test_same_media_same_key() -> None:
    """The same picture in another request and another place has the same key."""
    assert key(user(image())) == key(user(text(), image(), stream=True, max_tokens=3))


@pytest.mark.parametrize(
    "other",
    [
        user(image(OTHER_URL)),
        user(image(uuid="mine")),
        user(image(), mm_processor_kwargs={"max_pixels": 1}),
        user(image(), media_io_kwargs={"image": {"a": 1}}),
        user({"type": "image_url", "image_url": {"url": LONG_URL, "detail": "low"}}),
        user({"type": "video_url", "video_url": {"url": LONG_URL}}),
    ],
)
def test_all_that_changes_an_embedding_changes_the_key(other: dict[str, Any]) -> None:
    """Content, modality, options and the client's uuid each make another key."""
    assert key(user(image())) != key(other)


def test_a_client_uuid_is_no_identity() -> None:
    """Two pictures under one client uuid have different keys: nobody reads another's embedding."""
    assert key(user(image(uuid="u"))) != key(user(image(OTHER_URL, uuid="u")))


def test_components_cannot_be_shifted() -> None:
    """Text moved from one component into the next makes another key."""
    one = user(image(), mm_processor_kwargs={"a": 1})
    two = user(image(), media_io_kwargs={"a": 1})

    assert key(one) != key(two)


def test_a_key_is_a_safe_file_name() -> None:
    """vLLM's shared-folder connector joins the identifier into a path."""
    assert len(key(user(image()))) == 64
    assert key(user(image())).isalnum()
