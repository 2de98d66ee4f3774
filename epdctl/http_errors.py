"""The one place where failures become HTTP answers.

Rules of this file: an answer that has started is never followed by a second status line; unknown exceptions
become a fixed text with the request id and are logged with their traceback.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from epdctl.errors import (
    BodyTooLarge,
    EpdError,
    InvalidRequest,
    MethodNotAllowed,
    UnsupportedEncoding,
    UpstreamRefused,
    envelope,
)
from epdctl.wire import encode_json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
RESPONSE_STARTED: web.RequestKey[bool] = web.RequestKey("response_started", bool)

SERVER = "epdctl"
"""What answers call the server: a version is nobody's business."""

ENCODINGS = ("gzip", "deflate")
"""Content codings of bodies that are served: what aiohttp takes off wherever it runs."""

_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")


def accept_request_id(offered: str | None) -> str:
    """Return the client's request id when it is short and plain, else a new one."""
    if offered is not None and _ACCEPTED_ID.match(offered):
        return offered
    return secrets.token_hex(16)


class JsonRunner(web.AppRunner):
    """An application's runner whose answers are all ours, also to what is no valid HTTP."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _JsonServer
        return server


class _JsonServer(web.Server):
    """Makes the connections of a JsonRunner."""

    def __call__(self) -> web.RequestHandler:
        return _JsonHandler(self, loop=self._loop, **self._kwargs)


class _JsonHandler(web.RequestHandler):
    """One connection; what aiohttp refuses by itself gets our envelope in the place of its text."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer, and close the connection."""
        super().handle_error(request, status, exc, message)  # logs, and raises when an answer has begun
        request_id = accept_request_id(request.headers.get("x-request-id"))
        if status >= 500:
            response = internal_error_response(request_id)
        else:
            response = error_response(_translate_parse_error(exc, status), request_id)
        response.force_close()
        return response


def _translate_parse_error(error: BaseException | None, status: int) -> EpdError:
    """Return our error for one that aiohttp's parser raised."""
    if isinstance(error, ContentEncodingError):
        # It names the coding in its text only, at the end, but where a library is missing.
        return _undecodable() if error.message.endswith(ENCODINGS) else _unsupported_encoding()
    refused = InvalidRequest("this is not a request in valid HTTP, or its head is too long")
    refused.http_status = status  # type: ignore[misc]
    return refused


def _undecodable() -> EpdError:
    return InvalidRequest("the body does not have the encoding that its headers say")


def _unsupported_encoding() -> EpdError:
    return UnsupportedEncoding(
        f"the body's Content-Encoding is not served (served: {', '.join(ENCODINGS)}; or send it as it is)"
    )


def _check_encoding(request: web.Request) -> None:
    """Refuse codings that aiohttp takes off where their library happens to be, or leaves on the body."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if request.body_exists and encoding not in ("", "identity", *ENCODINGS):
        raise _unsupported_encoding()


def error_response(error: EpdError, request_id: str) -> web.Response:
    """Return the HTTP answer for `error`; a refused upstream's body is passed through unchanged."""
    headers = {"x-request-id": request_id, "Server": SERVER}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    if isinstance(error, UnsupportedEncoding):
        headers["Accept-Encoding"] = ", ".join(ENCODINGS)  # RFC 9110, 15.5.16
    if isinstance(error, UpstreamRefused):
        return web.Response(
            status=error.http_status, body=error.body, headers=headers | {"Content-Type": error.content_type}
        )
    return web.Response(
        status=error.http_status,
        body=encode_json(envelope(error)),
        headers=headers | {"Content-Type": "application/json"},
    )


def internal_error_response(request_id: str) -> web.Response:
    """Return the fixed 500 answer: no exception text ever leaves the process."""
    body = {
        "error": {
            "message": f"internal error, see the log for request {request_id}",
            "type": "server_error",
            "param": None,
            "code": "internal",
        }
    }
    return web.Response(
        status=500,
        body=encode_json(body),
        headers={"x-request-id": request_id, "Server": SERVER, "Content-Type": "application/json"},
    )


def translate_http_exception(error: web.HTTPException) -> EpdError:
    """Return our error for one that aiohttp raised while routing or reading a request."""
    if error.status == 413:
        return BodyTooLarge("the body is larger than this server accepts (--max-body-bytes)")
    if isinstance(error, web.HTTPMethodNotAllowed):
        refused = MethodNotAllowed("this endpoint does not take this method")
        refused.allowed = tuple(sorted(error.allowed_methods))
        return refused
    translated = InvalidRequest("no such endpoint" if error.status == 404 else error.reason)
    translated.http_status = error.status  # type: ignore[misc]
    return translated


async def refuse_other_methods(request: web.Request) -> None:
    """Refuse what another route than the one found, a catch-all, would take with another method.

    Raises:
        web.HTTPMethodNotAllowed: there are such methods.
    """
    found = request.match_info.route.resource
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource is not found:
            allowed |= (await resource.resolve(request))[1]
    if allowed:
        raise web.HTTPMethodNotAllowed(request.method, allowed)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id, and turn whatever a handler raises into one JSON error answer."""
    request_id = accept_request_id(request.headers.get("x-request-id"))
    request[REQUEST_ID] = request_id
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request_id)
    try:
        _check_encoding(request)
        response = await handler(request)
    except EpdError as error:
        failure = error
    except web.HTTPException as error:
        failure = translate_http_exception(error)
    except web.RequestPayloadError:
        failure = _undecodable()
    except Exception:
        structlog.get_logger().exception("internal_error", path=request.path)
        if request.get(RESPONSE_STARTED):
            raise
        return internal_error_response(request_id)
    else:
        if not response.prepared:
            response.headers["x-request-id"] = request_id
            response.headers.setdefault("Server", SERVER)
        return response
    try:
        if request.get(RESPONSE_STARTED):
            # The status line is out: a second one would land in the body (seen in aiohttp 3.13 and 3.14).
            raise failure
        return error_response(failure, request_id)
    finally:
        # It remembers this frame: together they would keep what the request held until the collector runs.
        del failure
