"""What a chat or completion request holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.domain import Modality
from epdctl.errors import InvalidRequest, UnsupportedMedia
from epdctl.proxy.content import Limits, parse_chat
from tests.unit.proxy.build import LIMITS, LONG_URL, TOKEN, body_of, chat, completion, image, text, user

pytestmark = pytest.mark.unit


def test_items_are_found_in_prompt_order() -> None:
    """Media keep their order over messages and parts, whatever stands between them."""
    request = chat(
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {
                    "role": "user",
                    "content": [image(), text(), {"type": "video_url", "video_url": {"url": LONG_URL}}],
                },
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "user", "content": ["words", {"type": "audio_url", "audio_url": "https://a/b.wav"}]},
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}],
                },
            ]
        }
    )

    assert [(item.message, item.part, item.modality) for item in request.items] == [
        (1, 0, Modality.IMAGE),
        (1, 2, Modality.VIDEO),
        (3, 1, Modality.AUDIO),
        (4, 0, Modality.AUDIO),
    ]
    assert [item.is_inline for item in request.items] == [True, True, False, True]


@pytest.mark.parametrize(
    ("part", "inline"),
    [
        (image(LONG_URL), True),
        (image("data:image/png;base64,AA"), True),
        (image("DATA:IMAGE/PNG;BASE64,AA"), True),
        (image("https://host/a.png"), False),
        (image("file:///a.png"), False),
        ({"type": "image_url", "image_url": LONG_URL}, True),
        ({"type": "input_image", "image_url": LONG_URL}, True),
        ({"image_url": {"url": LONG_URL}}, True),
        ({"image_url": LONG_URL, "uuid": "u"}, True),
        ({"type": None, "video_url": LONG_URL}, True),
    ],
)
def test_media_in_every_shape_that_vllm_reads(part: dict[str, Any], inline: bool) -> None:
    """A media part may be typed or not, with an object or a bare string."""
    (item,) = chat(user(part)).items

    assert item.is_inline is inline
    assert "uuid" not in item.fields


def test_escaped_scheme_is_recognised() -> None:
    """A data URL written with escapes is still content, not an address."""
    url = b'"\\u0064ata:image\\/png;base64,AA"'
    body = b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":' + url + b"}}]}]}"

    assert chat(body).items[0].is_inline


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": "x"},
        {"type": "video_embeds", "video_embeds": None, "uuid": "x"},
        {"type": "audio_embeds", "audio_embeds": "AAAA"},
        {"type": "prompt_embeds", "data": "AAAA"},
        {"type": b"image_\\u0065mbeds".decode("unicode_escape"), "image_embeds": {}},
        {"type": "text", "text": "x", "image_embeds": {}},
        {"image_embeds": {}, "uuid": "x"},
        {"type": "image_url", "image_url": {"url": LONG_URL}, "video_embeds": {}},
        {"type": "image_pil", "image_pil": "x"},
    ],
)
def test_client_embeddings_are_refused(part: dict[str, Any]) -> None:
    """Hazard 36: no shape of an embeddings part gets past the proxy; it could end an engine."""
    with pytest.raises(UnsupportedMedia) as caught:
        chat(user(text(), part))

    assert caught.value.param == "messages[0].content[1]"


def test_embeddings_in_reasoning_are_refused() -> None:
    """vLLM reads embeddings from an assistant's reasoning too."""
    message = {"role": "assistant", "content": "x", "reasoning": {"type": "prompt_embeds", "data": "AA"}}
    with pytest.raises(UnsupportedMedia):
        chat({"messages": [message]})


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "image_url", "uuid": "x"}, "messages[0].content[0]"),
        ({"type": "image_url", "image_url": None, "uuid": "x"}, "messages[0].content[0]"),
        ({"type": "image_url"}, "messages[0].content[0]"),
        ({"type": "text", "text": "x", "uuid": "x"}, "messages[0].content[0]"),
        ({"type": "text", "text": "x", "image_url": {"url": LONG_URL}}, "messages[0].content[0]"),
        (image(video_url={"url": LONG_URL}), "messages[0].content[0]"),
        (image("ftp://a/b"), "messages[0].content[0].image_url.url"),
        (image(""), "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": "\thttp://a/b"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": 3}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
        ({"type": "input_audio", "input_audio": "AAAA"}, "messages[0].content[0].input_audio"),
        (
            {"type": "input_audio", "input_audio": {"format": "wav"}},
            "messages[0].content[0].input_audio.data",
        ),
    ],
)
def test_media_that_could_be_read_in_two_ways_or_not_at_all(part: dict[str, Any], place: str) -> None:
    """A part with a uuid and no media, two media, or no readable URL is refused with its place."""
    with pytest.raises(UnsupportedMedia) as caught:
        chat(user(part))

    assert caught.value.param == place


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b'"x"', None),
        (b"{", None),
        (b'{"messages":NaN}', None),
        (b'{"messages":[{"content":[{"type":"text\xff"}]}]}', None),
        (b"{}", "messages"),
        (b'{"messages":null}', "messages"),
        (b'{"messages":"x"}', "messages"),
        (b'{"messages":[1]}', "messages"),
        (b'{"model":3,"messages":[]}', "model"),
        (b'{"messages":[{"content":[{"type":3}]}]}', "messages[0].content[0].type"),
    ],
)
def test_malformed_bodies(body: bytes, place: str | None) -> None:
    """What is no chat request gets a 400 that names the field."""
    with pytest.raises(InvalidRequest) as caught:
        chat(body)

    assert caught.value.param == place


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "some_new_part", "x": 1}]},
    ],
)
def test_messages_without_media_pass(message: dict[str, Any]) -> None:
    """Content may be null, absent, empty, or of a type that only the engine knows."""
    assert chat({"messages": [message]}).is_untouched


def test_more_items_than_allowed() -> None:
    """The number of media items is limited."""
    few = Limits(max_items=2, max_json_depth=64)
    assert len(chat(user(image(), image()), few).items) == 2

    with pytest.raises(InvalidRequest, match="more than 2"):
        chat(user(image(), image(), image()), few)


def test_too_deep() -> None:
    """Nesting is limited before anything is parsed."""
    with pytest.raises(InvalidRequest, match="deeper than 64"):
        parse_chat(b'{"a":' + b"[" * 100_000, LIMITS, TOKEN)


def test_transfer_params_of_the_client_are_dropped_and_named() -> None:
    """A client steers no transfer, neither at the top nor where vLLM merges extra arguments."""
    request = chat(
        user(
            text(),
            kv_transfer_params={"remote_host": "169.254.169.254"},
            ec_transfer_params={"consumer_zmq": "tcp://x:1"},
            vllm_xargs={"kv_transfer_params": "x", "mine": 1},
        )
    )

    assert request.dropped == ("kv_transfer_params", "ec_transfer_params", "kv_transfer_params")
    assert not {"kv_transfer_params", "ec_transfer_params"} & request.fields.keys()
    assert bytes(request.fields["vllm_xargs"]) == b'{"mine":1}'
    assert not request.is_untouched


def test_a_duplicated_key_cannot_hide_transfer_params() -> None:
    """Of a field given twice both are dropped."""
    body = b'{"messages":[],"ec_transfer_params":{"a":1},"ec_transfer_params":null}'

    assert "ec_transfer_params" not in chat(body).fields


def test_a_video_counts_twice_when_its_audio_is_used() -> None:
    """`use_audio_in_video` makes two features of a video, and of nothing else."""
    video = {"type": "video_url", "video_url": {"url": LONG_URL}}
    request = chat(user(video, image(), mm_processor_kwargs={"use_audio_in_video": True}))

    assert [item.feature_count for item in request.items] == [2, 1]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a"], 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3, 4]], 2), ([[1]], 1), ("", 1)],
)
def test_prompts_are_counted(prompt: Any, count: int) -> None:
    """A list of token ids is one prompt, a list of strings or of token lists is many."""
    assert completion({"model": "m", "prompt": prompt}).prompt_count == count


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": []}])
def test_a_completion_needs_a_prompt(body: dict[str, Any]) -> None:
    """A completion without a prompt is refused."""
    with pytest.raises(InvalidRequest) as caught:
        completion({"model": "m", **body})

    assert caught.value.param == "prompt"


def test_prompt_embeds_are_refused() -> None:
    """Hazard 36: embeddings do not get in by the other endpoint either."""
    with pytest.raises(UnsupportedMedia):
        completion({"prompt": "a", "prompt_embeds": "AAAA"})


def test_model_null_is_absent() -> None:
    """A null control field means absent."""
    assert chat(body_of({"model": None, "messages": []})).model is None
