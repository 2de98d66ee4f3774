"""Calls of the client for instances, as the tests of it make them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from epdctl.domain import InstanceUrl
from epdctl.proxy.connection import CallFailed
from epdctl.proxy.retry import FailureKind
from epdctl.proxy.upstream import Call, UpstreamClient
from tests.contract.scripted import Peer

Scenario = Callable[[], Coroutine[Any, Any, None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHAT = Call(path="/v1/chat/completions", body=(b'{"a":', memoryview(b"1}")), headers=b"X-A: 1\r\n")


async def ask(it: Peer, client: UpstreamClient | None = None, *, timeout_s: float = 5.0) -> Any:
    """Send one call and return the answer; an own client is closed again."""
    own = client or UpstreamClient(connect_timeout_s=1.0)
    try:
        return await own.call(InstanceUrl(it.url), CHAT, timeout_s=timeout_s)
    finally:
        if client is None:
            await own.close()


async def kind_of_failure(it: Peer, **options: float) -> FailureKind:
    """Return how a call fails."""
    with pytest.raises(CallFailed) as caught:
        await ask(it, **options)
    return caught.value.kind
