"""One exchange of a stub instance: which bytes go out, in which order, and where it breaks off.

Rules of this file: a script in `Chat` wins over the right answer; without one, a body that an engine would
refuse is refused. Body bytes are recorded in `call.sent` as the client should see them (unchunked).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from epdctl.domain import Role
from tests.stubs import answers
from tests.stubs.behaviour import Behaviour, Chat
from tests.stubs.http_wire import Head, chunk_bytes, head_bytes, reset_connection
from tests.stubs.validation import check_body, check_strictly

if TYPE_CHECKING:
    from tests.stubs.instance import Call

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
GENERATION_PATHS = (CHAT_PATH, COMPLETIONS_PATH)
_POST_PATHS = (*GENERATION_PATHS, "/start_profile", "/stop_profile")
_SSE_TYPE = "text/event-stream; charset=utf-8"


class Broken(Exception):
    """The exchange was broken off on purpose; the connection is gone."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request being answered."""

    role: Role
    behaviour: Behaviour
    host: str
    head: Head
    call: Call
    writer: asyncio.StreamWriter
    fill: Callable[[str], str]
    chat: Chat | None = None
    health_status: int | None = None

    @property
    def path(self) -> str | None:
        """The path below the base path, or None outside of it."""
        base = self.behaviour.base_path
        return self.head.path[len(base) :] if self.head.path.startswith(base) else None

    @property
    def request_id(self) -> str:
        """The id the client gave, or a fixed one."""
        return self.head.get("X-Request-ID") or "stub"

    def reset(self) -> NoReturn:
        """Reset the connection and end the exchange."""
        reset_connection(self.writer)
        raise Broken

    async def send_head(
        self, status: int, content_type: str, length: int | None, encoding: str | None = None
    ) -> None:
        """Send a response head; without a length the body is chunked."""
        given = dict(self.chat.headers) if self.chat is not None else {}
        headers = [("Server", "uvicorn"), ("Content-Type", content_type)]
        headers.append(
            ("Transfer-Encoding", "chunked") if length is None else ("Content-Length", str(length))
        )
        if encoding:
            headers.append(("Content-Encoding", encoding))
        if self.head.get("X-Request-ID"):
            headers.append(("X-Request-ID", self.request_id))
        if self.behaviour.keepalive_s is not None and not self.behaviour.close_silently:
            headers.append(("Keep-Alive", f"timeout={self.behaviour.keepalive_s:g}"))
        replaced = {name.lower() for name in given}
        headers = [pair for pair in headers if pair[0].lower() not in replaced] + list(given.items())
        await self._write(head_bytes(status, headers))

    async def send_piece(self, piece: bytes, *, chunked: bool) -> None:
        """Send a piece of the body and record it."""
        if self.call.first_sent_at is None:
            self.call.first_sent_at = time.monotonic()
        self.call.sent += piece
        await self._write(chunk_bytes(piece) if chunked else piece)

    async def end_chunks(self) -> None:
        """Send the last chunk."""
        await self._write(b"0\r\n\r\n")

    async def _write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


async def respond(exchange: Exchange) -> None:
    """Answer one request; raise Broken when the connection was broken off on purpose."""
    path = exchange.path
    if path in GENERATION_PATHS and exchange.head.method == "POST":
        await _generate(exchange)
    elif path == "/health":
        await _health(exchange)
    else:
        await _other(exchange, path)
    exchange.call.completed = True


async def _health(exchange: Exchange) -> None:
    if exchange.behaviour.health.hang:
        await _forever()
    await _send_whole(exchange, exchange.health_status or 200, b"", "text/plain")


async def _other(exchange: Exchange, path: str | None) -> None:
    method = exchange.head.method
    fixed: dict[str, Any] = {
        "/v1/models": {"object": "list", "data": [_model(name) for name in exchange.behaviour.models]},
        "/version": {"version": "0.32.0"},
        "/load": {"server_load": 0},
        "/ping": None,
        "/metrics": None,
        "/start_profile": None,
        "/stop_profile": None,
    }
    if path not in fixed:
        known = path in GENERATION_PATHS
        detail = "Method Not Allowed" if known else "Not Found"
        await _send_json(exchange, 405 if known else 404, {"detail": detail})
    elif (method == "POST") != (path in _POST_PATHS):
        await _send_json(exchange, 405, {"detail": "Method Not Allowed"})
    elif fixed[path] is None:
        await _send_whole(exchange, 200, b"", "text/plain")
    else:
        await _send_json(exchange, 200, fixed[path])


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 1795968157,
        "owned_by": "vllm",
        "root": name,
        "parent": None,
    }


async def _generate(exchange: Exchange) -> None:
    chat = exchange.chat or Chat()
    if chat.fail == "reset_after_body":
        await asyncio.sleep(chat.delay_ms / 1000)
        exchange.reset()
    await asyncio.sleep(_delay_ms(exchange, chat) / 1000)
    if chat.hang:
        await _forever()
    if chat.headers_then_hang:
        await exchange.send_head(chat.status or 200, "application/json", None)
        await _forever()
    script = chat.stream_pieces(exchange.fill)
    if script is not None:
        await _send_stream(exchange, chat, script)
    elif chat.status is not None or chat.json is not None or chat.text is not None:
        await _send_fixed(exchange, chat)
    else:
        await _send_right_answer(exchange, chat)


def _delay_ms(exchange: Exchange, chat: Chat) -> float:
    by_image = [
        delay
        for name, delay in chat.delay_by_image_ms.items()
        if exchange.fill(f"{{{{b64:{name}}}}}").encode() in exchange.call.body
    ]
    return chat.delay_ms + max(by_image, default=0)


async def _send_fixed(exchange: Exchange, chat: Chat) -> None:
    status = chat.status or 200
    if chat.json is not None:
        await _send_json(exchange, status, chat.json)
    elif chat.text is not None:
        await _send_whole(exchange, status, exchange.fill(chat.text).encode(), "text/plain; charset=utf-8")
    elif status >= 400:
        await _send_json(exchange, status, answers.Refusal(status=status, message=f"stub {status}").body())
    else:
        await _send_right_answer(exchange, chat)


async def _send_right_answer(exchange: Exchange, chat: Chat) -> None:
    is_chat = exchange.path == CHAT_PATH
    try:
        body = _parsed(exchange.call.body)
        check_body(body, chat=is_chat, models=exchange.behaviour.models)
        if exchange.behaviour.validate == "vllm":
            check_strictly(body)
    except answers.Refusal as refusal:
        await _send_json(exchange, refusal.status, refusal.body())
        return
    if body.get("stream") is True:
        words = ["tok "] * chat.chunks if chat.chunks is not None else list(answers.WORDS)
        if chat.echo_prompt:
            words = [answers.prompt_text(body)]
        events = answers.stream_events(
            body, chat=is_chat, words=words, request_id=exchange.request_id, usage=chat.usage
        )
        await _send_stream(exchange, chat, events)
    else:
        await _send_json(exchange, 200, _whole_answer(exchange, chat, body, is_chat))


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise answers.Refusal(status=400, message="Invalid JSON", kind="Bad Request") from None
    if not isinstance(body, dict):
        raise answers.Refusal(status=400, message="Input should be a valid dictionary", kind="Bad Request")
    return body


def _whole_answer(exchange: Exchange, chat: Chat, body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    text, finish, tokens = {
        Role.ENCODE: ("", "stop", 0),
        Role.PREFILL: (answers.WORDS[0], "length", 1),
    }.get(exchange.role, ("".join(answers.WORDS), "stop", len(answers.WORDS)))
    if chat.echo_prompt:
        text = answers.prompt_text(body)
    answer = answers.completion(
        body, chat=is_chat, text=text, finish=finish, tokens=tokens, request_id=exchange.request_id
    )
    if not is_chat:
        answer["choices"] = answers.completions_choices(body, text)
    if exchange.role is Role.ENCODE:
        answer["ec_transfer_params"] = answers.ec_transfer_params(body) or None
    if exchange.role is Role.PREFILL:
        answer["kv_transfer_params"] = answers.prefill_params(body, exchange.host, exchange.request_id)
    if chat.has_kv_transfer_params:
        answer["kv_transfer_params"] = chat.kv_transfer_params
    if chat.usage is not None:
        answer["usage"] = chat.usage
    return answer | dict(chat.json_extra)


async def _send_json(exchange: Exchange, status: int, value: Any) -> None:
    text = exchange.fill(json.dumps(value))
    await _send_whole(exchange, status, text.encode(), "application/json")


async def _send_whole(exchange: Exchange, status: int, body: bytes, content_type: str) -> None:
    chat = exchange.chat
    encoding = "gzip" if chat is not None and chat.gzip else None
    if encoding:
        body = gzip.compress(body, mtime=0)
    await exchange.send_head(status, content_type, len(body), encoding)
    if chat is not None and chat.fail == "reset_after_headers":
        exchange.reset()
    if chat is not None and chat.fail == "reset_after_chunk":
        await exchange.send_piece(body[: max(1, len(body) // 2)], chunked=False)
        exchange.reset()
    if body:
        await exchange.send_piece(body, chunked=False)


async def _send_stream(exchange: Exchange, chat: Chat, pieces: list[bytes]) -> None:
    await exchange.send_head(chat.status or 200, _SSE_TYPE, None)
    if chat.fail == "reset_after_headers":
        exchange.reset()
    for number, piece in enumerate(pieces):
        if number and chat.gap_ms:
            await asyncio.sleep(chat.gap_ms / 1000)
        await exchange.send_piece(piece, chunked=True)
        if chat.fail == "reset_after_chunk":
            await asyncio.sleep(0.02)
            exchange.reset()
    if chat.end == "hang":
        await _forever()
    if chat.end == "reset":
        await asyncio.sleep(0.02)
        exchange.reset()
    await exchange.end_chunks()


async def _forever() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody sets")
