"""What a request body holds: its fields, its media items in prompt order, and what was taken out of it.

Rules of this file:
- Pure. Foreign JSON becomes typed values here or an `InvalidRequest`/`UnsupportedMedia` that names the place.
- Values stay raw slices in skeleton space (see `cut`); a client's transfer parameters never pass, wherever
  vLLM would read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Raw

from epdctl.errors import InvalidRequest, UnsupportedMedia
from epdctl.proxy.cut import Cut, cut_body, is_deeper_than
from epdctl.proxy.parts import MediaItem, PartRules, read_part, refuse_embeds
from epdctl.proxy.slices import (
    Fields,
    first_byte,
    has_value,
    is_literal,
    object_or_none,
    read_list,
    read_object,
    read_value,
    write_object,
)

TRANSFER_PARAMS = ("kv_transfer_params", "ec_transfer_params")
_EXTRA_ARGS = "vllm_xargs"  # vLLM merges this object into the same place as the transfer parameters


_ABSENT = Raw(b"")


class _MessageView(msgspec.Struct):
    """The fields of a message that can hold parts."""

    content: Raw = _ABSENT
    reasoning: Raw = _ABSENT
    reasoning_content: Raw = _ABSENT


_MESSAGES = msgspec.json.Decoder(list[_MessageView])
_NOT_JSON = "the body is not valid JSON"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one request may hold."""

    max_items: int
    max_json_depth: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request body, in skeleton space; `cut` restores it.

    `fields` are the top-level fields without what was `dropped`; `items` is empty for a text-only request;
    `prompt_count` is 1 for a chat.
    """

    cut: Cut
    fields: Fields
    model: str | None
    is_stream: bool
    items: tuple[MediaItem, ...] = ()
    dropped: tuple[str, ...] = ()
    prompt_count: int = 1

    @property
    def is_untouched(self) -> bool:
        """Whether the client's bytes may be sent on as they are: nothing removed, no media to replace."""
        return not self.dropped and not self.items


def parse_chat(body: bytes | bytearray, limits: Limits, token: bytes) -> Request:
    """Return what the chat completion request in `body` holds.

    Raises:
        InvalidRequest: not JSON, too deep, a wrong type, or more media than allowed.
        UnsupportedMedia: embeddings, a uuid without media, or media in a shape that is not served.
    """
    try:
        return _read_chat(body, limits, token)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(_NOT_JSON) from error


def parse_completion(body: bytes | bytearray, limits: Limits, token: bytes) -> Request:
    """Return what the (text) completion request in `body` holds; raises as `parse_chat`."""
    try:
        return _read_completion(body, limits, token)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(_NOT_JSON) from error


def _read_chat(body: bytes | bytearray, limits: Limits, token: bytes) -> Request:
    cut, fields, dropped = _read_fields(body, limits, token)
    return Request(
        cut=cut,
        fields=fields,
        model=_model(fields),
        is_stream=is_literal(fields, "stream", b"true"),
        items=_find_items(fields, limits, token),
        dropped=dropped,
    )


def _read_completion(body: bytes | bytearray, limits: Limits, token: bytes) -> Request:
    cut, fields, dropped = _read_fields(body, limits, token)
    if "prompt_embeds" in fields:
        raise UnsupportedMedia("embeddings cannot be sent by clients", param="prompt_embeds")
    count = _count_prompts(fields)
    if count == 0:
        raise InvalidRequest("prompt is required and must not be empty", param="prompt")
    return Request(
        cut=cut,
        fields=fields,
        model=_model(fields),
        is_stream=is_literal(fields, "stream", b"true"),
        dropped=dropped,
        prompt_count=count,
    )


def _read_fields(
    body: bytes | bytearray, limits: Limits, token: bytes
) -> tuple[Cut, Fields, tuple[str, ...]]:
    cut = cut_body(body, token)
    if is_deeper_than(limits.max_json_depth, cut.skeleton):
        raise InvalidRequest(f"the body nests deeper than {limits.max_json_depth} levels")
    try:
        fields = read_object(cut.skeleton)
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object") from error
    return cut, *_drop_transfer_params(fields)


def _drop_transfer_params(fields: Fields) -> tuple[Fields, tuple[str, ...]]:
    dropped = [name for name in TRANSFER_PARAMS if name in fields]
    kept = {name: raw for name, raw in fields.items() if name not in dropped} if dropped else fields
    extra = object_or_none(fields.get(_EXTRA_ARGS))
    if extra and not extra.keys().isdisjoint(TRANSFER_PARAMS):
        dropped += [name for name in TRANSFER_PARAMS if name in extra]
        clean = {name: raw for name, raw in extra.items() if name not in TRANSFER_PARAMS}
        kept = {**kept, _EXTRA_ARGS: Raw(write_object(clean))}
    return kept, tuple(dropped)


def _model(fields: Fields) -> str | None:
    if not has_value(fields, "model"):
        return None
    value = read_value(fields["model"])
    if not isinstance(value, str):
        raise InvalidRequest("model must be a string", param="model")
    return value


def _count_prompts(fields: Fields) -> int:
    """Return how many prompts a completion asks for; a list of token ids is one, other lists are many."""
    if not has_value(fields, "prompt"):
        return 0
    raw = fields["prompt"]
    if first_byte(raw) != b"[":
        return 1
    prompts = read_list(raw)
    is_token_list = bool(prompts) and first_byte(prompts[0]) not in (b'"', b"[", b"{")
    return 1 if is_token_list else len(prompts)


def _find_items(fields: Fields, limits: Limits, token: bytes) -> tuple[MediaItem, ...]:
    if not has_value(fields, "messages"):
        raise InvalidRequest("messages is required", param="messages")
    try:
        messages = _MESSAGES.decode(fields["messages"])
    except msgspec.ValidationError as error:
        raise InvalidRequest("messages must be a list of objects", param="messages") from error
    rules = PartRules(token=token, audio_in_video=_uses_audio_in_video(fields))
    items: list[MediaItem] = []
    for number, message in enumerate(messages):
        if message.reasoning is not _ABSENT or message.reasoning_content is not _ABSENT:
            _refuse_embeds_in_reasoning(number, message)
        if first_byte(message.content) == b"[":
            _collect_items(items, number, message.content, rules, limits)
    return tuple(items)


def _uses_audio_in_video(fields: Fields) -> bool:
    options = object_or_none(fields.get("mm_processor_kwargs"))
    return options is not None and is_literal(options, "use_audio_in_video", b"true")


def _refuse_embeds_in_reasoning(number: int, message: _MessageView) -> None:
    for name, raw in (("reasoning", message.reasoning), ("reasoning_content", message.reasoning_content)):
        fields = object_or_none(raw)
        if fields is not None:
            refuse_embeds(fields, f"messages[{number}].{name}")


def _collect_items(
    items: list[MediaItem], message: int, content: Raw, rules: PartRules, limits: Limits
) -> None:
    for part, raw in enumerate(read_list(content)):
        fields = object_or_none(raw)
        if fields is None:
            continue
        item = read_part(fields, rules, index=len(items), message=message, part=part)
        if item is not None:
            items.append(item)
        if len(items) > limits.max_items:
            raise InvalidRequest(
                f"the request has more than {limits.max_items} media items", param="messages"
            )
