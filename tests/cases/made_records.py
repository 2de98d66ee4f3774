"""Records as a case's run leaves them: answers to clients, and calls of stubs."""

from __future__ import annotations

import json
from typing import Any

from tests.cases.http_client import Result
from tests.stubs.instance import Call

DONE = (
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    b'data: {"choices":[],"usage":{"n":1}}\n\n'
    b"data: [DONE]\n\n"
)
CHAT = "/v1/chat/completions"


def answer(body: Any = b"", **fields: Any) -> Result:
    """Return a whole answer of a step `q`, 200 unless said otherwise, that took 100 ms."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given: dict[str, Any] = {"status": 200, "complete": True, "started": 10.0, "ended": 10.1}
    given["first_byte_at"] = 10.05
    return Result(**{"step": "q", "index": 0, "body": data, **given, **fields})


def call(body: Any = None, **fields: Any) -> Call:
    """Return a recorded call of a generation route."""
    data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
    given: dict[str, Any] = {"method": "POST", "path": CHAT, "target": CHAT, "headers": (), "connection": 1}
    return Call(**{**given, "at": 10.0, "body": data, **fields})


def image(uuid: str, kind: str = "image_url") -> dict[str, Any]:
    """Return a chat body with one media part."""
    holder = {"url": "data:,x"} if kind == "image_url" else {"image_grid_thw": [1, 8, 4]}
    part = {"type": kind, kind: holder, "uuid": uuid}
    return {"messages": [{"role": "user", "content": [part]}]}
