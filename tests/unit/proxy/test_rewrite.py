"""The bodies for prefill and decode."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.proxy.content import Request
from epdctl.proxy.kv_handoff import NixlHandoff
from epdctl.proxy.rewrite import (
    NOTHING_ENCODED,
    Encoded,
    build_decode_body,
    build_prefill_body,
    build_whole_body,
    gather_reports,
    is_raw_fallback,
)
from epdctl.proxy.slices import read_list, read_object
from tests.unit.proxy.build import (
    LONG_URL,
    body_of,
    chat,
    completion,
    encode,
    ids_for,
    image,
    read_reply,
    sent,
    text,
    user,
    uuids_for,
)

pytestmark = pytest.mark.unit

KV = NixlHandoff().prefill_params()
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": LONG_URL}}

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.just(LONG_URL))
unknown = st.dictionaries(
    st.text(min_size=1, max_size=8)
    .map(lambda name: "x_" + name)
    .filter(lambda name: not name.endswith("_embeds")),
    st.one_of(
        scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=4), scalars, max_size=3)
    ),
    max_size=4,
)
parts = st.one_of(
    st.text(max_size=5),
    st.builds(text, st.one_of(st.text(max_size=8), st.just(LONG_URL))),
    st.sampled_from([image(), image("https://a/b.png", uuid="mine"), AUDIO, VIDEO]),
    st.builds(lambda extra: {"type": "tool_reference", **extra}, unknown),
)
contents = st.one_of(st.none(), st.text(max_size=8), st.lists(parts, max_size=5))
messages = st.lists(
    st.builds(lambda content, extra: {"role": "user", "content": content, **extra}, contents, unknown),
    max_size=4,
)
bodies = st.builds(
    lambda conversation, extra: {"model": "m", **extra, "messages": conversation}, messages, unknown
)


def raw_fields(body: bytes) -> dict[str, bytes]:
    """Return the top-level fields as raw JSON."""
    return {name: bytes(raw) for name, raw in read_object(body).items()}


def raw_parts(body: bytes) -> list[list[bytes] | bytes]:
    """Return each message's parts, or its content when that is no list, as raw JSON."""
    found: list[list[bytes] | bytes] = []
    for message in read_list(bytes(read_object(body)["messages"])):
        content = bytes(read_object(bytes(message)).get("content", b"null"))
        found.append([bytes(part) for part in read_list(content)] if content[:1] == b"[" else content)
    return found


@given(bodies)
def test_untouched_fields_keep_their_bytes(value: dict[str, Any]) -> None:
    """Whatever a client sends, decode gets all of it byte for byte but the media parts."""
    body = body_of(value)
    request = chat(body)
    out = b"".join(build_decode_body(request, encode(request), None))

    before, after = raw_fields(body), raw_fields(out)
    assert {name: after[name] for name in before if name != "messages"} == {
        name: before[name] for name in before if name != "messages"
    }
    places = {(item.message, item.part) for item in request.items}
    for number, (old, new) in enumerate(zip(raw_parts(body), raw_parts(out), strict=True)):
        for position, pair in enumerate(zip(old, new, strict=True)):
            if (number, position) not in places:
                assert pair[0] == pair[1]


@given(bodies)
def test_media_order_is_kept(value: dict[str, Any]) -> None:
    """The n-th media item of the client is the n-th embeds part and the n-th entry of decode's body."""
    request = chat(body_of(value))
    out = sent(build_decode_body(request, encode(request), None))

    uuids = [
        part["uuid"]
        for message in out["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if isinstance(part, dict) and str(part.get("type")).endswith("_embeds")
    ]
    assert uuids == [f"uuid-{item.index}" for item in request.items]
    if request.items:
        assert [entry["mm_hash"] for entry in out["ec_transfer_params"]["ec_items"]] == [
            f"hash-{item.index}" for item in request.items
        ]


@given(bodies)
def test_the_original_is_not_changed(value: dict[str, Any]) -> None:
    """Building bodies changes nothing: the next attempt starts from what the client sent."""
    body = bytearray(body_of(value))
    before = bytes(body)
    request = chat(bytes(body))
    build_prefill_body(request, encode(request), KV)
    build_decode_body(request, encode(request), KV)

    assert before == bytes(body) == b"".join(request.cut.restore(bytes(request.cut.skeleton)))


def test_an_untouched_text_request_is_the_clients_buffer() -> None:
    """A text-only request goes on as it came, without a copy."""
    body = b'{ "model" : "m", "messages":[ {"role":"user", "content":"hi"} ] }'
    request = chat(body)
    (piece,) = build_decode_body(request, NOTHING_ENCODED, None)

    assert isinstance(piece, memoryview)
    assert piece.obj is body


def test_a_media_part_becomes_metadata() -> None:
    """The shape that vLLM consumers read: embeds metadata flattened one level, our uuid, no picture."""
    request = chat(user(image(detail="low", uuid="theirs"), text()))
    out = sent(build_decode_body(request, encode(request, {0: {"image_grid_thw": [[1, 8, 8]]}}), None))

    assert out["messages"][0]["content"] == [
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "uuid-0"},
        text(),
    ]
    assert out["ec_transfer_params"] == {
        "ec_items": [{"mm_hash": "hash-0", "transfer_id": "t0.0"}],
        "hash-0": {"item_indices": [0], "metadata": {"image_grid_thw": [[1, 8, 8]]}, "modality": "image"},
    }


def test_a_video_with_audio_is_one_part() -> None:
    """Both features of a video stand in one embeds part; each has its entry."""
    request = chat(user(VIDEO, mm_processor_kwargs={"use_audio_in_video": True}))
    report = read_reply(
        request,
        {
            "v": {"item_indices": [0], "modality": "video", "metadata": {"video_grid_thw": [1, 2, 2]}},
            "a": {"item_indices": [1], "modality": "audio", "metadata": {"audio_feature_lengths": 7}},
        },
    )
    out = sent(
        build_decode_body(request, gather_reports([report], ids_for(request), uuids_for(request)), None)
    )

    assert out["messages"][0]["content"] == [
        {
            "type": "video_embeds",
            "video_embeds": {"video_grid_thw": [1, 2, 2]},
            "audio_embeds": {"audio_feature_lengths": [7]},
            "uuid": "uuid-0",
        }
    ]
    assert [entry["transfer_id"] for entry in out["ec_transfer_params"]["ec_items"]] == ["t0.0", "t0.1"]


@pytest.mark.parametrize("metadata", [{}, None])
def test_one_item_without_metadata_keeps_all_raw(metadata: Any) -> None:
    """Never a mixture: if one item cannot be sized, every item stays raw, with its uuid and all entries."""
    request = chat(user(image(uuid="theirs"), image("https://a/b.png")))
    encoded = encode(request, {1: metadata})
    out = sent(build_decode_body(request, encoded, None))

    assert is_raw_fallback(request, encoded)
    assert out["messages"][0]["content"] == [image(uuid="uuid-0"), image("https://a/b.png", uuid="uuid-1")]
    assert out["ec_transfer_params"]["ec_items"] == [
        {"mm_hash": "hash-0", "transfer_id": "t0.0"},
        {"mm_hash": "hash-1", "transfer_id": "t1.0"},
    ]


def test_an_unreported_item_keeps_its_place() -> None:
    """An item that was not reported is named by its transfer id alone, so that positions stay right."""
    request = chat(user(image(), image()))
    report = read_reply(request, {"a": {"item_indices": [1], "metadata": {"image_grid_thw": [1, 2, 2]}}})
    out = sent(
        build_decode_body(request, gather_reports([report], ids_for(request), uuids_for(request)), None)
    )

    assert out["ec_transfer_params"]["ec_items"] == [
        {"transfer_id": "t0.0"},
        {"mm_hash": "a", "transfer_id": "t1.0"},
    ]


def test_no_rewrite_leaves_media_and_sends_no_uuid() -> None:
    """With --no-rewrite the consumer gets the media as they are, and the entries to look up."""
    request = chat(user(image(uuid="theirs"), text()))
    rewritten = encode(request)
    encoded = Encoded(
        features=rewritten.features,
        entries=rewritten.entries,
        transfer_ids=rewritten.transfer_ids,
        uuids=None,
    )
    out = sent(build_decode_body(request, encoded, None))

    assert out["messages"][0]["content"] == [image(), text()]
    assert out["ec_transfer_params"]["ec_items"] == [{"mm_hash": "hash-0", "transfer_id": "t0.0"}]


def test_prefill_computes_one_token_and_hands_over() -> None:
    """Token limits go down together, streaming goes away, everything else stays."""
    request = chat(
        user(
            text(),
            max_tokens=64,
            max_completion_tokens=65,
            min_tokens=16,
            n=4,
            stream=True,
            stream_options={"include_usage": True},
            top_logprobs=0,
        )
    )
    out = sent(build_prefill_body(request, NOTHING_ENCODED, KV))

    assert out == {
        **user(text()),
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "stream": False,
        "top_logprobs": 0,
        "kv_transfer_params": json.loads(KV),
    }


@pytest.mark.parametrize("name", ["max_completion_tokens", "min_tokens", "n", "stream_options"])
def test_null_means_absent_for_prefill(name: str) -> None:
    """A null control field stays null, or goes with streaming; it is never compared with a number."""
    out = sent(build_prefill_body(chat(user(text(), **{name: None})), NOTHING_ENCODED, KV))

    assert out.get(name) is None
    assert out["max_tokens"] == 1


@pytest.mark.parametrize(("given_", "lowered"), [(0, 0), (1, 1), (2, 1), (1.5, 1), ("7", "7"), (True, True)])
def test_min_tokens_is_lowered_not_raised(given_: Any, lowered: Any) -> None:
    """min_tokens never goes up, and a wrong type is the engine's to refuse."""
    out = sent(build_prefill_body(chat(user(text(), min_tokens=given_)), NOTHING_ENCODED, KV))

    assert out["min_tokens"] == lowered


def test_decode_gets_the_prefills_parameters_word_for_word() -> None:
    """What prefill answered is not read, only passed on."""
    params = b'{"remote_block_ids": [], "x" : 1.0}'
    out = b"".join(build_decode_body(chat(user(text())), NOTHING_ENCODED, params))

    assert b'"kv_transfer_params":' + params in out


def test_a_whole_body_names_no_transfer() -> None:
    """Without a hand-off decode gets media, not metadata, and nothing of the client's parameters."""
    request = chat(user(image(uuid="theirs"), ec_transfer_params={"a": 1}))

    assert sent(build_whole_body(request, uuids_for(request))) == user(image(uuid="uuid-0"))


def test_a_completion_body_keeps_its_prompt_form() -> None:
    """Token ids stay token ids."""
    request: Request = completion({"model": "m", "prompt": [1, 2, 3], "max_tokens": 9})

    assert sent(build_prefill_body(request, NOTHING_ENCODED, KV))["prompt"] == [1, 2, 3]
