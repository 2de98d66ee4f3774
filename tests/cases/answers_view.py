"""Readings of an answer: dotted paths into JSON, SSE events, generated text, media parts.

Rules of this file: pure; reading something that is not there gives MISSING, never an exception.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.stubs.answers import EMBEDS_KEYS, MEDIA_KEYS, content_parts, media_url

MISSING = object()


def parse(data: bytes) -> Any:
    """Return the JSON value in `data`, or MISSING."""
    try:
        return json.loads(data)
    except ValueError:
        return MISSING


def at_path(value: Any, path: str) -> Any:
    """Return what a dotted path finds (`choices.0.text`), or MISSING."""
    for word in path.split("."):
        if isinstance(value, list) and word.lstrip("-").isdigit() and -len(value) <= int(word) < len(value):
            value = value[int(word)]
        elif isinstance(value, dict) and word in value:
            value = value[word]
        else:
            return MISSING
    return value


def matches(found: Any, wanted: Any) -> bool:
    """Whether a value is as wanted: `~x` means it contains x, a list means any of, null also absent."""
    if wanted is None:
        return found is None or found is MISSING
    if isinstance(wanted, str) and wanted.startswith("~"):
        return found is not MISSING and wanted[1:] in str(found)
    if isinstance(wanted, bool) or isinstance(found, bool):
        return found is wanted
    return bool(found == wanted)


def sse_events(body: bytes) -> list[str]:
    """Return the data of every complete SSE event, in order."""
    text = body.decode("utf-8", "replace").replace("\r\n", "\n").lstrip("\ufeff")
    blocks = text.split("\n\n")[:-1]
    events = []
    for block in blocks:
        data = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        if data:
            events.append("\n".join(data))
    return events


def sse_is_complete(body: bytes) -> bool:
    """Whether a stream's events all parse and its last one is `[DONE]`."""
    events = sse_events(body)
    return bool(events) and events[-1] == "[DONE]" and all(_is_json(event) for event in events[:-1])


def _is_json(text: str) -> bool:
    return parse(text.encode()) is not MISSING


def sse_values(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream that are JSON objects."""
    for event in sse_events(body):
        value = parse(event.encode())
        if isinstance(value, dict):
            yield value


def has_error_event(body: bytes) -> bool:
    """Whether a stream tells of an error."""
    return any("error" in value for value in sse_values(body))


def usage_chunks(body: bytes) -> int:
    """How many events of a stream carry usage."""
    return sum(1 for value in sse_values(body) if value.get("usage"))


def generated_text(body: bytes) -> str:
    """Return the text of an answer, streamed or whole."""
    whole = parse(body)
    values = [whole] if isinstance(whole, dict) else list(sse_values(body))
    texts = []
    for value in values:
        for choice in value.get("choices") or []:
            holder = choice.get("message") or choice.get("delta") or choice
            texts.append(holder.get("content") or holder.get("text") or "")
    return "".join(texts)


def all_media(body: Any) -> list[dict[str, Any]]:
    """Return the media parts of a body, raw or embeds, in prompt order."""
    if not isinstance(body, dict):
        return []
    return [part for part in content_parts(body) if part.get("type") in {*MEDIA_KEYS, *EMBEDS_KEYS}]


def raw_media(body: Any) -> list[dict[str, Any]]:
    """Return the raw media parts of a body."""
    return [part for part in all_media(body) if part.get("type") in MEDIA_KEYS]


def media_names(body: Any, names_by_url: dict[str, str], names_by_uuid: dict[str, str]) -> list[str | None]:
    """Return the file name of each media part: from its URL, else from the uuid an encoder saw with it."""
    return [
        names_by_url.get(media_url(part))
        or names_by_uuid.get(str(part.get("uuid")))
        or (media_url(part).rsplit("/", 1)[-1] if part.get("type") in MEDIA_KEYS else None)
        for part in all_media(body)
    ]
