"""What vLLM's OpenAI frontend refuses.

Rules of this file: pure; `check_body` is what every engine refuses, `check_strictly` adds the checks a case
asks for with `validate: vllm`.
"""

from __future__ import annotations

from typing import Any

from tests.stubs.answers import EMBEDS_KEYS, JSON, MEDIA_KEYS, Refusal, content_parts

_PART_KINDS = {*MEDIA_KEYS, *EMBEDS_KEYS, "text", "refusal", "input_text", "thinking"}


def check_body(body: Any, *, chat: bool, models: tuple[str, ...]) -> None:
    """Raise Refusal for a body that no vLLM frontend takes."""
    if not isinstance(body, dict):
        raise Refusal(status=400, message="Input should be a valid dictionary")
    if models and body.get("model") not in models:
        name = body.get("model")
        raise Refusal(
            status=404, message=f"The model `{name}` does not exist.", kind="NotFoundError", param="model"
        )
    if chat:
        _check_chat(body)
    elif body.get("prompt") in (None, [], ""):
        raise Refusal(status=400, message="prompt: Field required", kind="Bad Request")


def _check_chat(body: JSON) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refusal(status=400, message="messages: Input should be a valid list", kind="Bad Request")
    kinds: dict[str, set[bool]] = {}
    for part in content_parts(body):
        kind = part.get("type")
        if kind not in _PART_KINDS:
            raise Refusal(status=400, message=f"Unknown part type: {kind}")
        if kind in MEDIA_KEYS or kind in EMBEDS_KEYS:
            modality = MEDIA_KEYS.get(kind) or EMBEDS_KEYS[kind]
            kinds.setdefault(modality, set()).add(kind in EMBEDS_KEYS)
    mixed = [modality for modality, forms in kinds.items() if len(forms) == 2]
    if mixed:
        raise Refusal(
            status=400, message=f"Mixing raw {mixed[0]} and {mixed[0]} embedding inputs is not allowed"
        )


def check_strictly(body: JSON) -> None:
    """Raise Refusal for control fields of the wrong type or in a combination that vLLM refuses."""
    for name in ("max_tokens", "max_completion_tokens", "min_tokens", "n"):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise Refusal(status=400, message=f"{name}: Input should be a valid integer", param=name)
    if body.get("stream") is not None and not isinstance(body["stream"], bool):
        raise Refusal(status=400, message="stream: Input should be a valid boolean", param="stream")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise Refusal(status=400, message="Stream options can only be defined when `stream=True`.")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if (body.get("max_tokens") is not None and body["max_tokens"] < 1) or (limit is not None and limit < 1):
        raise Refusal(status=400, message=f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
    if limit is not None and (body.get("min_tokens") or 0) > limit:
        raise Refusal(
            status=400,
            message=f"min_tokens must be less than or equal to max_tokens={limit}",
            param="min_tokens",
        )
