"""Right answers of a vLLM 0.32/0.33 instance, in the shape of the recorded hops.

Rules of this file: pure; a body that vLLM's frontend would refuse gets vLLM's 400, so that a proxy cannot
pass a test with a request that no engine would take.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.stubs.pictures import data_url_start, image_grid, picture_size

JSON = dict[str, Any]

MEDIA_KEYS = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}
EMBEDS_KEYS = {"image_embeds": "image", "audio_embeds": "audio", "video_embeds": "video"}
UNKNOWN_GRID = [1, 4, 4]
WORDS = ("A", " small", " red", " square", " on", " white", ".")


class Refusal(Exception):
    """What vLLM's frontend answers to a body it does not take."""

    def __init__(
        self, *, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param

    def body(self) -> JSON:
        """The error envelope, with the status as its code."""
        fault = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return {"error": fault}


def content_parts(body: Mapping[str, Any]) -> Iterator[JSON]:
    """Yield the content parts of all messages that are objects, in order."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict):
                yield part


def media_parts(body: Mapping[str, Any]) -> list[JSON]:
    """Return the raw media parts of a chat body, in prompt order."""
    return [part for part in content_parts(body) if part.get("type") in MEDIA_KEYS]


def embeds_parts(body: Mapping[str, Any]) -> list[JSON]:
    """Return the parts that stand for embeddings sent by other means, in prompt order."""
    return [part for part in content_parts(body) if part.get("type") in EMBEDS_KEYS]


def media_url(part: JSON) -> str:
    """Return the URL of a media part, or its audio as a data URL, or nothing."""
    if part.get("type") == "input_audio":
        audio = part.get("input_audio") or {}
        return f"data:audio/{audio.get('format', 'wav')};base64,{audio.get('data', '')}"
    holder = part.get(str(part.get("type")))
    url = holder.get("url") if isinstance(holder, dict) else None
    return url if isinstance(url, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One processed output: where its item stands, what it is called, and its metadata."""

    mm_hash: str
    modality: str
    metadata: JSON


def features(body: JSON) -> list[Feature]:
    """Return the features of an encode body; a video whose audio is used gives two."""
    options = _options(body)
    found: list[Feature] = []
    for part in media_parts(body):
        modality = MEDIA_KEYS[part["type"]]
        kinds = [modality]
        if modality == "video" and options.get("mm_processor_kwargs", {}).get("use_audio_in_video"):
            kinds.append("audio")
        found += [
            Feature(
                mm_hash=identifier(body, part, kind), modality=kind, metadata=_metadata(part, kind, options)
            )
            for kind in kinds
        ]
    return found


def identifier(body: JSON, part: JSON, modality: str) -> str:
    """Return the feature's name: the uuid itself, or a hash when options are in force or no uuid is given."""
    uuid = part.get("uuid")
    options = _options(body)
    if uuid is not None and not options:
        return str(uuid)
    name = uuid if uuid is not None else media_url(part)
    text = json.dumps([body.get("model"), modality, name, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _options(body: JSON) -> JSON:
    return {key: body[key] for key in ("mm_processor_kwargs", "media_io_kwargs") if body.get(key)}


def _metadata(part: JSON, modality: str, options: JSON) -> JSON:
    if modality == "video":
        return {"video_grid_thw": [2, 8, 8]}
    if modality == "audio":
        return {"audio_feature_lengths": [100]}
    data = data_url_start(media_url(part))
    size = picture_size(data) if data else None
    if size is None or not size.width or not size.height:
        return {"image_grid_thw": UNKNOWN_GRID}
    limits = options.get("mm_processor_kwargs", {})
    bounds = {key: limits[key] for key in ("min_pixels", "max_pixels") if isinstance(limits.get(key), int)}
    return {"image_grid_thw": image_grid(size, **bounds)}


def ec_transfer_params(body: JSON) -> JSON:
    """Return what an encoder reports: one entry per distinct feature, with every position of it."""
    given = (body.get("ec_transfer_params") or {}).get("ec_items") or []
    entries: JSON = {}
    for index, feature in enumerate(features(body)):
        entry = entries.setdefault(
            feature.mm_hash,
            {"modality": feature.modality, "item_indices": [], "metadata": feature.metadata},
        )
        entry["item_indices"].append(index)
        if index < len(given) and given[index].get("transfer_id"):
            entry["transfer_id"] = given[index]["transfer_id"]
    return entries


def prefill_params(body: JSON, host: str, request_id: str) -> JSON | None:
    """Return the hand-off that a NIXL prefill gives, or None when the request asks for none."""
    asked = body.get("kv_transfer_params")
    if not isinstance(asked, dict) or not asked.get("do_remote_decode") or asked.get("transfer_id"):
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1]],
        "remote_engine_id": "79ef9b34-5bad-49b4-a3b8-1cd00b35fce7",
        "remote_request_id": f"chatcmpl-{request_id}-92898e15",
        "remote_host": host,
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 56,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def completion(body: JSON, *, chat: bool, text: str, finish: str, tokens: int, request_id: str) -> JSON:
    """Return a whole answer; the role fills in its `*_transfer_params`."""
    choice: JSON = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
    else:
        choice["text"] = text
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1795968157,
        "model": body.get("model"),
        "choices": [choice],
        "system_fingerprint": "vllm-0.32.0-stub",
        "usage": {"prompt_tokens": 56, "total_tokens": 56 + tokens, "completion_tokens": tokens},
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def completions_choices(body: JSON, text: str) -> list[JSON]:
    """Return one choice per prompt of a `/v1/completions` body."""
    prompt = body.get("prompt")
    count = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return [
        {"index": i, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        for i in range(count)
    ]


def stream_events(
    body: JSON, *, chat: bool, words: list[str], request_id: str, usage: Any = None
) -> list[bytes]:
    """Return the SSE events of a whole stream: role, one per word, finish, usage when asked for, `[DONE]`."""
    base = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1795968176,
        "model": body.get("model"),
    }

    def event(choices: list[JSON], **more: Any) -> bytes:
        return b"data: " + json.dumps(base | {"choices": choices} | more).encode() + b"\n\n"

    def choice(word: str, finish: str | None, **delta: Any) -> JSON:
        spoken = {"delta": {"content": word} | delta} if chat else {"text": word}
        return {"index": 0, **spoken, "logprobs": None, "finish_reason": finish}

    events = [event([choice("", None, role="assistant")])] if chat else []
    events += [event([choice(word, None)]) for word in words]
    events.append(event([choice("", "stop")]))
    if (body.get("stream_options") or {}).get("include_usage"):
        counted = {"prompt_tokens": 56, "total_tokens": 56 + len(words), "completion_tokens": len(words)}
        events.append(event([], usage=counted if usage is None else usage))
    return [*events, b"data: [DONE]\n\n"]


def prompt_text(body: JSON) -> str:
    """Return the text of a prompt: all text parts and string contents, or the `prompt` field."""
    if "prompt" in body:
        return json.dumps(body["prompt"]) if not isinstance(body["prompt"], str) else body["prompt"]
    texts: list[str] = []
    for message in body.get("messages") or []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            texts.append(content)
        parts = content if isinstance(content, list) else []
        texts += [str(p.get("text")) for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    return " ".join(texts)
