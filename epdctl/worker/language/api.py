"""The language worker's own routes: `POST /v1/chat/completions` and `POST /v1/completions`.

Rules of this file: HTTP in, HTTP out. No status is sent before the first token is there.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import structlog
from aiohttp import web

from epdctl import __version__
from epdctl.http_errors import REQUEST_ID
from epdctl.wire import encode_json, parse_object
from epdctl.worker.language.answers import (
    AnswerFrame,
    Json,
    Prompted,
    chat_answer,
    chat_chunk,
    chat_role_chunk,
    chat_usage_chunk,
    completion_answer,
    completion_chunk,
    completion_usage_chunk,
    usage,
)
from epdctl.worker.language.front import LanguageFront
from epdctl.worker.language.generation import Generation
from epdctl.worker.language.replicas import RANK_HEADER
from epdctl.worker.language.request import AnswerRules, ChatRequest, CompletionRequest
from epdctl.worker.language.sse import answer_stream


def add_language_routes(
    app: web.Application, front: LanguageFront, *, model: str, draining: Callable[[], bool]
) -> None:
    """Add the routes to `app`."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = parse_object(await request.read())
        asked, generation = await front.chat(body, request.headers.get(RANK_HEADER))
        async with generation, _FinishedLine(request, generation):
            frame = _frame(f"chatcmpl-{request[REQUEST_ID]}", model, asked, generation)
            if asked.answer.stream:
                return await answer_stream(request, _chat_stream(frame, generation, asked.answer), draining)
            await _finish(generation)
            return _json(chat_answer(frame, generation.choices, kv_transfer_params=_kv_params(generation)))

    async def completion(request: web.Request) -> web.StreamResponse:
        body = parse_object(await request.read())
        asked, generation = await front.completion(body, request.headers.get(RANK_HEADER))
        async with generation, _FinishedLine(request, generation):
            frame = _frame(f"cmpl-{request[REQUEST_ID]}", model, asked, generation)
            if asked.answer.stream:
                groups = _completion_stream(frame, generation, asked.answer)
                return await answer_stream(request, groups, draining)
            await _finish(generation)
            prompts = [Prompted(token_ids=run.token_ids, choices=run.choices) for run in generation.runs]
            return _json(completion_answer(frame, prompts, kv_transfer_params=_kv_params(generation)))

    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/completions", completion)


class _FinishedLine:
    """Writes one line when a request has ended, however it did."""

    def __init__(self, request: web.Request, generation: Generation) -> None:
        self._request = request
        self._generation = generation
        self._began = time.monotonic()

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        generation = self._generation
        structlog.get_logger().info(
            "generation_finished",
            route=self._request.path,
            outcome="ok" if kind is None else getattr(kind, "code", "aborted"),
            prompt_tokens=generation.prompt_tokens,
            completion_tokens=generation.completion_tokens,
            elapsed_s=round(time.monotonic() - self._began, 4),
        )


def _json(body: Json) -> web.Response:
    return web.Response(body=encode_json(body), content_type="application/json")


def _frame(
    answer_id: str, model: str, asked: ChatRequest | CompletionRequest, generation: Generation
) -> AnswerFrame:
    return AnswerFrame(
        id=answer_id,
        created=int(time.time()),
        model=model,
        fingerprint=f"epdctl-{__version__}",
        prompt_ids=generation.runs[0].token_ids,
        return_token_ids=asked.answer.return_token_ids,
        want_logprobs=asked.tokens.logprobs is not None,
        rules=generation.rules,
    )


def _kv_params(generation: Generation) -> Json | None:
    return None if generation.ticket is None else msgspec.to_builtins(generation.ticket)


async def _finish(generation: Generation) -> None:
    """Let the choices take all their tokens."""
    async for _ in generation.pieces():
        pass


async def _chat_stream(
    frame: AnswerFrame, generation: Generation, rules: AnswerRules
) -> AsyncGenerator[Sequence[Json]]:
    """Yield the chunks of a chat stream, those of one engine step together."""
    head: list[Json] = [chat_role_chunk(frame, index) for index in range(len(generation.choices))]
    async for pieces in generation.pieces():
        is_last = not rules.include_usage and all(c.finish is not None for c in generation.choices)
        chunks = [
            chat_chunk(frame, p.choice, p.delta, is_last=is_last and p is pieces[-1])
            for p in pieces
            if _says_something(frame, p.delta)
        ]
        yield _with_usage(head + chunks, generation, rules)
        head = []
    if rules.include_usage:
        yield [chat_usage_chunk(frame, generation.completion_tokens)]


async def _completion_stream(
    frame: AnswerFrame, generation: Generation, rules: AnswerRules
) -> AsyncGenerator[Sequence[Json]]:
    """Yield the chunks of a completion stream, those of one engine step together."""
    offsets = [0] * len(generation.choices)
    async for pieces in generation.pieces():
        chunks = []
        for piece in pieces:
            if _says_something(frame, piece.delta):
                chunks.append(completion_chunk(frame, piece.choice, piece.delta, offsets[piece.choice]))
            offsets[piece.choice] += len(piece.delta.text)
        yield _with_usage(chunks, generation, rules)
    if rules.include_usage:
        yield [completion_usage_chunk(frame, generation.prompt_tokens, generation.completion_tokens)]


def _says_something(frame: AnswerFrame, delta: Any) -> bool:
    """Text held back, and halves of characters, make no chunk of their own unless their tokens are wanted."""
    wants_tokens = frame.want_logprobs or frame.return_token_ids
    return bool(delta.text) or delta.finish is not None or wants_tokens


def _with_usage(chunks: list[Json], generation: Generation, rules: AnswerRules) -> list[Json]:
    if not rules.continuous_usage:
        return chunks
    counts = usage(generation.prompt_tokens, generation.completion_tokens)
    return [chunk | {"usage": counts} for chunk in chunks]
