"""The encode worker's own route: `POST /v1/chat/completions`, answered as a vLLM encoder answers it.

Rules of this file: one log line a finished request; what it says is ids, counts and times, never media.
"""

from __future__ import annotations

import time

import structlog
from aiohttp import web

from epdctl.errors import EpdError
from epdctl.http_errors import REQUEST_ID
from epdctl.wire import encode_json, parse_object
from epdctl.worker.encode.front import EncodeFront
from epdctl.worker.encode.reply import EncodedItem, build_reply


def add_encode_routes(app: web.Application, front: EncodeFront, model: str) -> None:
    """Add the route to `app`."""

    async def chat(request: web.Request) -> web.Response:
        begun = time.monotonic()
        items: list[EncodedItem] = []
        outcome = "aborted"
        try:
            items = await front.encode(parse_object(await request.read()))
            outcome = "ok"
        except EpdError as error:
            outcome = error.code
            raise
        finally:
            _log_finished(outcome, items, time.monotonic() - begun)
        request_id = request[REQUEST_ID]
        reply = build_reply(items, request_id=request_id, model=model, created=int(time.time()))
        return web.Response(body=encode_json(reply), content_type="application/json")

    app.router.add_post("/v1/chat/completions", chat)


def _log_finished(outcome: str, items: list[EncodedItem], elapsed_s: float) -> None:
    structlog.get_logger().info(
        "encode_finished",
        outcome=outcome,
        items=len(items),
        rows=sum(item.rows for item in items),
        transfer_ids=[item.transfer_id for item in items if item.transfer_id is not None],
        elapsed_s=round(elapsed_s, 4),
    )
