"""Generation requests: bodies of `/v1/chat/completions` and `/v1/completions` as typed values.

Rules of this file: pure; every refusal names the field. Names and ranges are OpenAI's with vLLM 0.33.0's
additions; what would change the answer and is not supported here is refused, unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epdctl.errors import InvalidRequest
from epdctl.worker.language.content import ImagePart, MediaRules, parse_messages
from epdctl.worker.language.fields import Fields, is_token_id

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_TOP_LOGPROBS = 20
_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Everything a request says about choosing tokens; `max_tokens` None means as many as fit.

    `logprobs` None: no report; else how many alternatives to list per token.
    """

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    n: int
    logprobs: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    stops: tuple[str, ...]
    keep_stop: bool
    keep_special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """How the answer is to be delivered."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EcItem:
    """An entry of `ec_transfer_params.ec_items`: a push that was made for this request."""

    transfer_id: str | None
    mm_hash: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request; `messages` are ready for a chat template, media replaced by `{"type": ...}` alone."""

    model: str | None
    messages: Sequence[Mapping[str, Any]]
    images: tuple[ImagePart, ...]
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any]
    ec_items: tuple[EcItem, ...]
    kv_transfer_params: Mapping[str, Any] | None
    tokens: TokenRules
    answer: AnswerRules


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A completion request: one or more prompts, each a text or token ids."""

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    kv_transfer_params: Mapping[str, Any] | None
    tokens: TokenRules
    answer: AnswerRules


def parse_chat(body: Mapping[str, Any], rules: MediaRules) -> ChatRequest:
    """Return the chat request in `body`; `rules` say what media the model takes.

    Raises:
        InvalidRequest, UnsupportedMedia: naming the field.
    """
    fields = Fields(body)
    _refuse_unsupported(fields)
    messages, images = parse_messages(fields.raw("messages"), rules)
    continue_final = fields.flag("continue_final_message")
    generation_prompt = fields.flag("add_generation_prompt", default=not continue_final)
    if continue_final and generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return ChatRequest(
        model=fields.text("model"),
        messages=messages,
        images=images,
        tools=_tools(fields),
        add_generation_prompt=generation_prompt,
        continue_final_message=continue_final,
        template_kwargs=fields.object("chat_template_kwargs") or {},
        ec_items=_ec_items(fields),
        kv_transfer_params=fields.object("kv_transfer_params"),
        tokens=_token_rules(fields, _chat_logprobs(fields), default_max_tokens=None),
        answer=_answer_rules(fields),
    )


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the completion request in `body`; raises InvalidRequest naming the field."""
    fields = Fields(body)
    _refuse_unsupported(fields)
    _refuse(fields, {"echo": (None, False), "suffix": (None, ""), "best_of": (None, 1)})
    return CompletionRequest(
        model=fields.text("model"),
        prompts=_prompts(fields),
        kv_transfer_params=fields.object("kv_transfer_params"),
        tokens=_token_rules(fields, fields.integer("logprobs", 0, MAX_TOP_LOGPROBS), default_max_tokens=16),
        answer=_answer_rules(fields),
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse what would have to change the answer and cannot here."""
    kind = (fields.object("response_format") or {}).get("type", "text")
    if kind != "text":
        raise InvalidRequest(
            "response_format other than text needs guided decoding, which this worker does not have",
            param="response_format",
        )
    neutral: dict[str, tuple[object, ...]] = {
        "logit_bias": (None, {}),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "repetition_penalty": (None, 1),
        "prompt_logprobs": (None,),
        "use_beam_search": (None, False),
        "structured_outputs": (None,),
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_choice": (None,),
        "guided_grammar": (None,),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "functions": (None, []),
    }
    _refuse(fields, neutral)


def _refuse(fields: Fields, neutral: Mapping[str, tuple[object, ...]]) -> None:
    for name, allowed in neutral.items():
        if fields.raw(name) not in allowed:
            raise InvalidRequest(f"{name} is not supported by this worker", param=name)


def _tools(fields: Fields) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools for the chat template; calls in the answer stay text, so none can be forced."""
    tools = fields.raw("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise fields.refuse("tools", "a list of objects")
    choice = fields.raw("tool_choice")
    if choice not in (None, "auto", "none"):
        raise InvalidRequest(
            "tool_choice must be auto or none: this worker cannot force a call", param="tool_choice"
        )
    return None if not tools or choice == "none" else tools


def _token_rules(fields: Fields, logprobs: int | None, *, default_max_tokens: int | None) -> TokenRules:
    maximum = fields.integer("max_completion_tokens", 1, _INT64)
    if maximum is None:
        maximum = fields.integer("max_tokens", 1, _INT64)
    if maximum is None:
        maximum = default_max_tokens
    minimum = fields.integer("min_tokens", 0, _INT64) or 0
    if maximum is not None and minimum > maximum:
        raise InvalidRequest("min_tokens must not be above max_tokens", param="min_tokens")
    top_k = fields.integer("top_k", -1, _INT64) or 0
    top_p = fields.number("top_p", 0, 1, 1)
    if top_p == 0:
        raise fields.refuse("top_p", "above 0 and at most 1")
    return TokenRules(
        max_tokens=maximum,
        min_tokens=minimum,
        temperature=fields.number("temperature", 0, 100, 1),
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0, 1, 0),
        seed=fields.integer("seed", -_INT64 - 1, _INT64),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        logprobs=logprobs,
        ignore_eos=fields.flag("ignore_eos"),
        stop_token_ids=fields.token_ids("stop_token_ids", MAX_STOPS),
        stops=fields.texts("stop", MAX_STOPS),
        keep_stop=fields.flag("include_stop_str_in_output"),
        keep_special=not fields.flag("skip_special_tokens", default=True),
    )


def _chat_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not fields.flag("logprobs"):
        if top:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return top or 0


def _answer_rules(fields: Fields) -> AnswerRules:
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    nested = Fields(options or {}, "stream_options")
    return AnswerRules(
        stream=stream,
        include_usage=nested.flag("include_usage"),
        continuous_usage=nested.flag("continuous_usage_stats"),
        return_token_ids=fields.flag("return_token_ids"),
    )


def _ec_items(fields: Fields) -> tuple[EcItem, ...]:
    params = fields.object("ec_transfer_params")
    items = (params or {}).get("ec_items")
    if items is None:
        return ()
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InvalidRequest(
            "ec_transfer_params.ec_items must be a list of objects", param="ec_transfer_params.ec_items"
        )
    parsed = []
    for index, item in enumerate(items):
        nested = Fields(item, f"ec_transfer_params.ec_items[{index}]")
        parsed.append(EcItem(transfer_id=nested.text("transfer_id"), mm_hash=nested.text("mm_hash")))
    return tuple(parsed)


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.raw("prompt")
    expected = "a string, a list of strings, a list of token ids, or a list of such lists"
    if value is None or value == []:
        raise InvalidRequest(f"prompt is required: {expected}", param="prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise fields.refuse("prompt", expected)
    if all(map(is_token_id, value)):
        return (tuple(value),)
    if all(isinstance(v, str) for v in value):
        return tuple(value)
    if all(isinstance(v, list) and v and all(map(is_token_id, v)) for v in value):
        return tuple(tuple(v) for v in value)
    raise fields.refuse("prompt", expected)
