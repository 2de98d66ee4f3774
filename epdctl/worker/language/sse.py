"""Server-sent events: a stream whose status line is sent only when there is something to say.

Rules of this file: after the first byte a failure is one `error` event and the end of the connection, without
`[DONE]`. A client that is gone ends the stream quietly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import structlog
from aiohttp import web

from epdctl.errors import EpdError, ShuttingDown, envelope
from epdctl.http_errors import REQUEST_ID, RESPONSE_STARTED
from epdctl.wire import encode_json

DONE = b"data: [DONE]\n\n"
WRITE_DEADLINE_S = 60.0


def event(body: Any) -> bytes:
    """Return `body` as one event."""
    return b"data: " + encode_json(body) + b"\n\n"


async def answer_stream(
    request: web.Request, groups: AsyncGenerator[Sequence[Any]], draining: Callable[[], bool]
) -> web.StreamResponse:
    """Answer with each group of bodies as one write, then `[DONE]`.

    What the first group raises goes to the caller: nothing has been sent then. `draining` tells a cancel of
    ours at the end of a grace period from the client's leaving.
    """
    async with aclosing(groups):
        return await _stream(request, groups, draining)


async def _stream(
    request: web.Request, groups: AsyncGenerator[Sequence[Any]], draining: Callable[[], bool]
) -> web.StreamResponse:
    first = await anext(groups)
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "x-request-id": request[REQUEST_ID],
        }
    )
    request[RESPONSE_STARTED] = True
    try:
        await response.prepare(request)
        await _write(response, b"".join(map(event, first)))
        async for group in groups:
            await _write(response, b"".join(map(event, group)))
        await _write(response, DONE)
    except EpdError as error:
        await _end_with(response, error)
    except asyncio.CancelledError:
        if not draining():
            raise
        await _end_with(response, ShuttingDown("this worker is shutting down"))
    except (ConnectionResetError, TimeoutError):
        response.force_close()
        structlog.get_logger().debug("client_left")
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Write, and wait until the client takes it; one that takes nothing for a minute counts as gone."""
    if data:
        async with asyncio.timeout(WRITE_DEADLINE_S):
            await response.write(data)


async def _end_with(response: web.StreamResponse, error: EpdError) -> None:
    structlog.get_logger().warning("stream_ended_with_error", error_code=error.code)
    response.force_close()
    try:
        await _write(response, event(envelope(error)))
    except (ConnectionResetError, TimeoutError):
        structlog.get_logger().debug("client_left")
