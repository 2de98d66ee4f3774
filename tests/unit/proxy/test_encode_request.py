"""What an encoder is asked."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.proxy.encode_request import build_encode_body
from tests.unit.proxy.build import LONG_URL, chat, ids_for, image, sent, text, user, uuids_for

pytestmark = pytest.mark.unit


def asked(body: dict[str, Any], *, rewrites: bool = True, consumer: str | None = "tcp://c:1") -> Any:
    """Return the JSON that the encoder gets for all items of a chat request."""
    request = chat(body)
    built = build_encode_body(
        request,
        request.items,
        uuids=uuids_for(request) if rewrites else None,
        transfer_ids=ids_for(request),
        consumer_zmq=consumer,
    )
    return sent(built)


def test_only_the_media_and_what_changes_them_go_to_an_encoder() -> None:
    """No text, no token limit, no stream options; the processing options and the queue place are copied."""
    body = user(
        text(),
        image(uuid="theirs"),
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        mm_processor_kwargs={"max_pixels": 6272},
        media_io_kwargs={"video": {"num_frames": 4}},
        priority=3,
        session_id="s",
        tools=[],
    )

    assert asked(body) == {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": LONG_URL}, "uuid": "uuid-0"}],
            }
        ],
        "stream": False,
        "mm_processor_kwargs": {"max_pixels": 6272},
        "media_io_kwargs": {"video": {"num_frames": 4}},
        "priority": 3,
        "session_id": "s",
        "ec_transfer_params": {"consumer_zmq": "tcp://c:1", "ec_items": [{"transfer_id": "t0.0"}]},
    }


def test_every_feature_has_a_transfer_id() -> None:
    """Identical items share a uuid and still get an id each; a video with audio gets two."""
    video = {"type": "video_url", "video_url": {"url": LONG_URL}}
    body = user(image(), image(), video, mm_processor_kwargs={"use_audio_in_video": True})

    assert asked(body)["ec_transfer_params"]["ec_items"] == [
        {"transfer_id": "t0.0"},
        {"transfer_id": "t1.0"},
        {"transfer_id": "t2.0"},
        {"transfer_id": "t2.1"},
    ]


def test_without_a_consumer_nothing_is_said_about_pushing() -> None:
    """A consumer without an EC address fetches by other means."""
    assert "ec_transfer_params" not in asked(user(image()), consumer=None)


def test_without_rewriting_no_uuid_is_sent() -> None:
    """With --no-rewrite both halves derive the identifier themselves; the client's uuid does not pass."""
    (part,) = asked(user(image(uuid="theirs")), rewrites=False)["messages"][0]["content"]

    assert part == image()
