"""A web server with the pictures that `http` scenarios name."""

from __future__ import annotations

from contextlib import AsyncExitStack

from aiohttp import web

from tests.interop.engines import HOST
from tests.interop.scenarios import MediaUrl, picture_bytes
from tests.stubs.ports import free_port


async def _picture(request: web.Request) -> web.Response:
    deployment, _, index = request.match_info["name"].rpartition("-")
    return web.Response(body=picture_bytes(deployment, int(index)), content_type="image/png")


async def serve_pictures(stack: AsyncExitStack) -> MediaUrl:
    """Serve `<deployment>-<index>` until the stack closes; return what makes a URL of such a name."""
    app = web.Application()
    app.router.add_get("/media/{name}.png", _picture)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    port = free_port()
    await web.TCPSite(runner, HOST, port).start()
    return lambda name: f"http://{HOST}:{port}/media/{name}.png"
