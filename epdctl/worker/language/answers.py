"""Answers in OpenAI's JSON shapes, with the fields that vLLM 0.32.0 was captured to send.

Rules of this file: plain values in, dicts out; no encoding, no text decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epdctl.worker.language.choice import Choice, Delta, TextRules
from epdctl.worker.language.messages import Token

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFrame:
    """What all chunks of an answer share; `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    fingerprint: str
    prompt_ids: Sequence[int]
    return_token_ids: bool
    want_logprobs: bool
    rules: TextRules

    def token_ids(self, tokens: Sequence[Token]) -> list[int] | None:
        """Return the ids for an answer that wants them."""
        return [token.id for token in tokens] if self.return_token_ids else None


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the token counts of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


_NO_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}


def chat_answer(
    frame: AnswerFrame, choices: Sequence[Choice], *, kv_transfer_params: Mapping[str, Any] | None = None
) -> Json:
    """Return a whole `chat.completion`."""
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    return {
        "id": frame.id,
        "object": "chat.completion",
        "created": frame.created,
        "model": frame.model,
        "choices": [_chat_choice(frame, index, choice) for index, choice in enumerate(choices)],
        "service_tier": None,
        "system_fingerprint": frame.fingerprint,
        "usage": usage(len(frame.prompt_ids), completion_tokens) | _NO_DETAILS,
        "prompt_logprobs": None,
        "prompt_token_ids": list(frame.prompt_ids) if frame.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": kv_transfer_params,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _chat_choice(frame: AnswerFrame, index: int, choice: Choice) -> Json:
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": _chat_logprobs(frame, choice.tokens),
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
        "token_ids": frame.token_ids(choice.tokens),
        "routed_experts": None,
    }


def _chunk(frame: AnswerFrame, choices: list[Json]) -> Json:
    return {
        "id": frame.id,
        "object": "chat.completion.chunk",
        "created": frame.created,
        "model": frame.model,
        "choices": choices,
    }


def chat_role_chunk(frame: AnswerFrame, index: int) -> Json:
    """Return a choice's first chunk, which carries the role."""
    delta = {"role": "assistant", "content": ""}
    chunk = _chunk(frame, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
    prompt_ids = list(frame.prompt_ids) if frame.return_token_ids else None
    return chunk | {"prompt_token_ids": prompt_ids, "prompt_text": None}


def chat_chunk(frame: AnswerFrame, index: int, delta: Delta, *, is_last: bool = False) -> Json:
    """Return the chunk of one delta; the last of a stream without a usage chunk carries the fingerprint."""
    choice: Json = {
        "index": index,
        "delta": {"content": delta.text},
        "logprobs": _chat_logprobs(frame, delta.tokens),
        "finish_reason": delta.finish,
    }
    if delta.finish is not None:
        choice["stop_reason"] = delta.stop_reason
    chunk = _chunk(frame, [choice | {"token_ids": frame.token_ids(delta.tokens)}])
    return chunk | {"system_fingerprint": frame.fingerprint} if is_last else chunk


def chat_usage_chunk(frame: AnswerFrame, completion_tokens: int) -> Json:
    """Return the last chunk of a stream that was asked for its usage."""
    counts = usage(len(frame.prompt_ids), completion_tokens)
    return _chunk(frame, []) | {"usage": counts, "system_fingerprint": frame.fingerprint}


def _chat_logprobs(frame: AnswerFrame, tokens: Sequence[Token]) -> Json | None:
    if not frame.want_logprobs:
        return None
    return {"content": [_chat_logprob(frame, token) for token in tokens]}


def _chat_logprob(frame: AnswerFrame, token: Token) -> Json:
    top = [_entry(frame, token_id, logprob) for token_id, logprob in token.top]
    return _entry(frame, token.id, token.logprob) | {"top_logprobs": top}


def _entry(frame: AnswerFrame, token_id: int, logprob: float | None) -> Json:
    raw = frame.rules.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """One prompt of a completion request, with its choices."""

    token_ids: Sequence[int]
    choices: Sequence[Choice]


def completion_answer(
    frame: AnswerFrame, prompts: Sequence[Prompted], *, kv_transfer_params: Mapping[str, Any] | None = None
) -> Json:
    """Return a whole `text_completion`; choices of all prompts are numbered through."""
    numbered = [(prompt, choice) for prompt in prompts for choice in prompt.choices]
    completion_tokens = sum(len(choice.tokens) for _, choice in numbered)
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return {
        "id": frame.id,
        "object": "text_completion",
        "created": frame.created,
        "model": frame.model,
        "choices": [_completion_choice(frame, i, p, c) for i, (p, c) in enumerate(numbered)],
        "service_tier": None,
        "system_fingerprint": frame.fingerprint,
        "usage": usage(prompt_tokens, completion_tokens) | _NO_DETAILS,
        "kv_transfer_params": kv_transfer_params,
    }


def _completion_choice(frame: AnswerFrame, index: int, prompt: Prompted, choice: Choice) -> Json:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": completion_logprobs(frame, choice.tokens, 0),
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
        "token_ids": frame.token_ids(choice.tokens),
        "prompt_logprobs": None,
        "prompt_token_ids": list(prompt.token_ids) if frame.return_token_ids else None,
    }


def completion_chunk(frame: AnswerFrame, index: int, delta: Delta, offset: int) -> Json:
    """Return the chunk of one delta whose tokens start `offset` characters into the text."""
    choice = {
        "index": index,
        "text": delta.text,
        "logprobs": completion_logprobs(frame, delta.tokens, offset),
        "finish_reason": delta.finish,
        "stop_reason": delta.stop_reason,
        "token_ids": frame.token_ids(delta.tokens),
    }
    return _completion_chunk(frame, [choice])


def _completion_chunk(frame: AnswerFrame, choices: list[Json]) -> Json:
    return {
        "id": frame.id,
        "object": "text_completion",
        "created": frame.created,
        "model": frame.model,
        "choices": choices,
    }


def completion_usage_chunk(frame: AnswerFrame, prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the last chunk of a stream that was asked for its usage."""
    counts = usage(prompt_tokens, completion_tokens)
    return _completion_chunk(frame, []) | {"usage": counts, "system_fingerprint": frame.fingerprint}


def completion_logprobs(frame: AnswerFrame, tokens: Sequence[Token], offset: int) -> Json | None:
    """Return log probabilities in the completion shape; the first token's text starts at `offset`."""
    if not frame.want_logprobs:
        return None
    texts = [frame.rules.token_bytes(token.id).decode(errors="replace") for token in tokens]
    offsets = [offset + sum(len(text) for text in texts[:i]) for i in range(len(texts))]
    return {
        "text_offset": offsets,
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": texts,
        "top_logprobs": [_top(frame, token) for token in tokens],
    }


def _top(frame: AnswerFrame, token: Token) -> Json:
    pairs = [*token.top, (token.id, token.logprob)]
    return {frame.rules.token_bytes(i).decode(errors="replace"): logprob for i, logprob in pairs}
