"""Takes a request in: whose it is, its body, and what it may carry on.

Rules of this file: a body is received into one buffer and never copied again; it is refused as soon as it is
known to be too large, and given up when it stops arriving.
"""

from __future__ import annotations

import asyncio
import ctypes

from aiohttp import web

from epdctl.errors import BodyTooLarge, InvalidRequest, NotAuthenticated
from epdctl.http_auth import is_same_secret

_PREALLOCATE_BYTES = 16 * 1024 * 1024
_GROWTH = 4

# CPython's own constructor, which leaves the bytes as they are when it is given no text.
_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype = ctypes.py_object
_new_bytearray.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]


class DataPlaneKeys:
    """The keys of the data plane; without any, all clients are let in and their Authorization passes."""

    def __init__(self, keys: frozenset[str], upstream_key: str | None) -> None:
        self._keys = keys
        self._upstream = None if upstream_key is None else f"Bearer {upstream_key}"

    def check(self, authorization: str | None) -> None:
        """Raise NotAuthenticated unless `authorization` (the client's header) carries one of the keys."""
        if not self._keys:
            return
        scheme, _, offered = (authorization or "").partition(" ")
        # All keys are compared, so that the time does not tell which one was close.
        matches = [is_same_secret(offered.strip(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise NotAuthenticated("a valid API key is needed: send 'Authorization: Bearer KEY'")

    def upstream_authorization(self, authorization: str | None) -> str | None:
        """Return the Authorization for the instances: ours, or the client's where no keys are asked for."""
        if self._upstream is not None:
            return self._upstream
        return None if self._keys else authorization


async def read_body(request: web.Request, *, limit: int, idle_s: float) -> bytes | bytearray:
    """Return the request's body.

    Raises:
        BodyTooLarge: more than `limit` bytes.
        InvalidRequest: it cannot be read, or nothing came for `idle_s`.
    """
    length = None if "Content-Encoding" in request.headers else request.content_length
    if length is not None and length > limit:
        raise _too_large(limit)
    try:
        if request.content.is_eof():
            body = request.content.read_nowait(-1)
            if len(body) > limit:
                raise _too_large(limit)
            return body
        return await _gather(request, length, limit, idle_s)
    except TimeoutError:
        raise InvalidRequest("the body stopped arriving") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest("the body cannot be read") from error


async def _gather(request: web.Request, length: int | None, limit: int, idle_s: float) -> bytearray:
    """Return the body; where its length is known each piece goes straight to its place."""
    loop = asyncio.get_running_loop()
    body = _unwritten(min(length or 0, _PREALLOCATE_BYTES))
    size = 0
    async with asyncio.timeout(idle_s) as deadline:
        async for piece in request.content.iter_any():
            deadline.reschedule(loop.time() + idle_s)
            end = size + len(piece)
            if end > limit:
                raise _too_large(limit)
            if end > len(body):
                body.extend(_unwritten(_grown(len(body), end, length) - len(body)))
            body[size:end] = piece
            size = end
    # What nobody has written must not be read: the rest goes, before anybody sees the body.
    del body[size:]
    return body


def _unwritten(size: int) -> bytearray:
    """Return `size` bytes that nobody has written; zeroing megabytes only to overwrite them is not free."""
    body: bytearray = _new_bytearray(None, size)
    return body


def _grown(have: int, need: int, length: int | None) -> int:
    """Return the buffer's next size: by a factor, so that growing copies little, to the length if known."""
    wanted = max(need, have * _GROWTH)
    return max(need, min(wanted, length)) if length is not None else wanted


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes (--max-body-bytes)")
