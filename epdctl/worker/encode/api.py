"""The encode worker's own route: `POST /v1/chat/completions`, answered as a vLLM encoder answers it."""

from __future__ import annotations

import time

import structlog
from aiohttp import web

from epdctl.http_errors import REQUEST_ID
from epdctl.wire import encode_json, parse_object
from epdctl.worker.encode.front import EncodeFront
from epdctl.worker.encode.reply import build_reply


def add_encode_routes(app: web.Application, front: EncodeFront, model: str) -> None:
    """Add the route to `app`."""

    async def chat(request: web.Request) -> web.Response:
        begun = time.monotonic()
        items = await front.encode(parse_object(await request.read()))
        request_id = request[REQUEST_ID]
        reply = build_reply(items, request_id=request_id, model=model, created=int(time.time()))
        structlog.get_logger().info(
            "encode_finished", items=len(items), elapsed_s=round(time.monotonic() - begun, 4)
        )
        return web.Response(body=encode_json(reply), content_type="application/json")

    app.router.add_post("/v1/chat/completions", chat)
