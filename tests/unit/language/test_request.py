"""Bodies of generation requests: what is taken, and how what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.domain import Modality
from epdctl.errors import InvalidRequest, UnsupportedMedia
from epdctl.worker.language.content import MediaRules
from epdctl.worker.language.request import EcItem, parse_chat, parse_completion

RULES = MediaRules(merge=2)

pytestmark = pytest.mark.unit


def chat(**fields: Any) -> dict[str, Any]:
    """Return a chat body."""
    return {"messages": [{"role": "user", "content": "hi"}]} | fields


def content(*parts: Any) -> dict[str, Any]:
    """Return a chat body whose one message has these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(grid: Any = (1, 8, 8), uuid: Any = "u") -> dict[str, Any]:
    """Return a part for an encoded image."""
    grid = list(grid) if isinstance(grid, tuple) else grid
    return {"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}, "uuid": uuid}


WRONG_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -3),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("max_tokens", 0),
    ("max_tokens", "8"),
    ("max_completion_tokens", -1),
    ("n", 0),
    ("n", 1000),
    ("seed", "x"),
    ("stop", ""),
    ("stop", [1]),
    ("stop", ["a"] * 33),
    ("stop_token_ids", [-1]),
    ("ignore_eos", 1),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("top_logprobs", 3),
    ("tools", {}),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("logit_bias", {"5": 1}),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("structured_outputs", {"json": {}}),
    ("modalities", ["text", "audio"]),
]


@pytest.mark.parametrize(("name", "value"), WRONG_FIELDS)
def test_a_wrong_field_is_named(name: str, value: Any) -> None:
    """Each wrong or unsupported field is a 400 that names it."""
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(chat(**{name: value}), RULES)

    assert (refused.value.param, name in refused.value.message) == (name, True)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [5],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": 5, "content": "x"}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    """Missing or malformed messages are a 400 whose param starts with messages."""
    with pytest.raises(InvalidRequest) as refused:
        parse_chat({"messages": messages}, RULES)

    assert (refused.value.param or "").startswith("messages")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "video_embeds"])
def test_media_that_is_not_encoded_is_refused_with_the_way_out(kind: str) -> None:
    """Pixels never get here: the answer says that the proxy has media encoded."""
    with pytest.raises(UnsupportedMedia) as refused:
        parse_chat(content({"type": "text", "text": "x"}, {"type": kind, kind: {}}), RULES)

    assert refused.value.param == "messages[0].content[1]"


def test_a_video_leaves_its_place_where_the_model_takes_videos() -> None:
    """An encoded video becomes a template's video part with its grid; its metadata has its own names."""
    part = {"type": "video_embeds", "uuid": "v", "video_embeds": {"video_grid_thw": [2, 4, 6]}}
    rules = MediaRules(merge=2, videos=True)

    request = parse_chat(content(part, image()), rules)

    assert request.messages[0]["content"] == [{"type": "video"}, {"type": "image"}]
    assert (request.images[0].modality, request.images[0].grid) == (Modality.VIDEO, (2, 4, 6))
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(content(part | {"video_embeds": {"image_grid_thw": [2, 4, 6]}}), rules)
    assert refused.value.param == "messages[0].content[0].video_embeds.video_grid_thw"


def test_an_unknown_part_is_refused() -> None:
    """A part of an unknown type is unsupported media, and the message says what a client may send."""
    with pytest.raises(UnsupportedMedia, match="whose type is text") as refused:
        parse_chat(content({"type": "hologram"}), RULES)

    assert refused.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    "grid", [None, [1, 8], [1, 8, 8, 8], [0, 8, 8], [1, -8, 8], [1, 7, 8], [1, 8.0, 8], "AAAA", [1, 8, 2**40]]
)
def test_a_wrong_grid_is_refused(grid: Any) -> None:
    """A grid that no image of this model has never reaches the engine."""
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(content(image(grid)), RULES)

    assert refused.value.param == "messages[0].content[0].image_embeds.image_grid_thw"


@pytest.mark.parametrize("uuid", [None, "", 5, "x" * 2000])
def test_an_image_without_a_name_is_refused(uuid: Any) -> None:
    """Without a uuid nothing says which embedding is meant."""
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(content(image(uuid=uuid)), RULES)

    assert refused.value.param == "messages[0].content[0].uuid"


def test_images_leave_their_place_to_the_template() -> None:
    """An encoded image becomes a template's image part, and its grid is kept in order."""
    request = parse_chat(content(image(), {"type": "text", "text": "?"}, image([[1, 4, 6]], "v")), RULES)

    assert request.messages[0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "?"},
        {"type": "image"},
    ]
    assert [(i.uuid, i.grid) for i in request.images] == [("u", (1, 8, 8)), ("v", (1, 4, 6))]


def test_nulls_are_absent() -> None:
    """A field that is null counts as left out."""
    names = [
        "temperature",
        "max_tokens",
        "n",
        "stop",
        "seed",
        "tools",
        "stream_options",
        "ec_transfer_params",
    ]
    request = parse_chat(chat(**dict.fromkeys(names)), RULES)

    assert (request.tokens.temperature, request.tokens.max_tokens, request.tokens.n) == (1.0, None, 1)


def test_unknown_fields_are_ignored() -> None:
    """A field nobody knows changes nothing, as with vLLM."""
    assert parse_chat(chat(totally_unknown_field={"a": 1}), 2).tokens == parse_chat(chat(), RULES).tokens


def test_max_completion_tokens_wins() -> None:
    """OpenAI's newer name counts when both are there."""
    assert parse_chat(chat(max_tokens=5, max_completion_tokens=7), RULES).tokens.max_tokens == 7


def test_min_above_max_is_refused() -> None:
    """A request cannot ask for at least more than at most."""
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(chat(max_tokens=2, min_tokens=3), RULES)

    assert refused.value.param == "min_tokens"


def test_past_tool_calls_reach_the_template_as_objects() -> None:
    """An assistant turn with null content and tool calls is taken, its arguments parsed."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    message = parse_chat(body, RULES).messages[0]

    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == ("", {"a": 1})


def test_tools_go_to_the_template_unless_switched_off() -> None:
    """tool_choice none leaves the tools out."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    used = parse_chat(chat(tools=tools), RULES).tools
    unused = parse_chat(chat(tools=tools, tool_choice="none"), RULES).tools

    assert (used, unused) == (tools, None)


@pytest.mark.parametrize("items", [5, "x", {"a": 1}, [5], [["x"]], [{"transfer_id": 5}]])
def test_ec_items_of_a_wrong_type_are_refused(items: Any) -> None:
    """What kills a vLLM scheduler (a list of non-objects) is a 400 here."""
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(chat(ec_transfer_params={"ec_items": items}), RULES)

    assert (refused.value.param or "").startswith("ec_transfer_params.ec_items")


def test_ec_items_are_read() -> None:
    """Transfer ids and hashes come from ec_items; the per-hash entries beside them are not read."""
    params = {"ec_items": [{"transfer_id": "t", "mm_hash": "h"}, {}], "h": {"metadata": {}}}

    assert parse_chat(chat(ec_transfer_params=params), RULES).ec_items == (
        EcItem(transfer_id="t", mm_hash="h"),
        EcItem(transfer_id=None, mm_hash=None),
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts_in_all_forms(prompt: Any, expected: Any) -> None:
    """A completion takes texts and token ids, one or several."""
    assert parse_completion({"prompt": prompt}).prompts == expected


@pytest.mark.parametrize("prompt", [None, [], 5, [1, "a"], [[]], [[-1]], [True], {"a": 1}])
def test_a_wrong_prompt_is_refused(prompt: Any) -> None:
    """Anything else is a 400 that names the prompt."""
    with pytest.raises(InvalidRequest) as refused:
        parse_completion({"prompt": prompt})

    assert refused.value.param == "prompt"


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("suffix", "x"), ("best_of", 3)])
def test_completion_features_that_are_missing_are_refused(name: str, value: Any) -> None:
    """What this worker cannot do for a completion is a 400 that names it."""
    with pytest.raises(InvalidRequest) as refused:
        parse_completion({"prompt": "a", name: value})

    assert refused.value.param == name
