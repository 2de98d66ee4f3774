"""Names a request's media items: digests of what is in the body, random uuids for what is behind a URL.

Rules of this file: each item is hashed once for all attempts; large ones in a thread, because a hash of
megabytes would hold up every stream of the process.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor

from epdctl.proxy.content import Request
from epdctl.proxy.cut import body_length
from epdctl.proxy.keys import OFF_LOOP_BYTES, digest, key_material
from epdctl.proxy.parts import MediaItem

_THREADS = 4


class Naming:
    """Makes uuids; owns the threads that hash."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="hash")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def digests(self, request: Request) -> dict[int, str]:
        """Return the digest of each item's part, by item index: for media behind a URL that of the URL."""
        if len(request.items) == 1:
            item = request.items[0]
            return {item.index: await self._digest(request, item)}
        digests = await asyncio.gather(*(self._digest(request, item) for item in request.items))
        return {item.index: name for item, name in zip(request.items, digests, strict=True)}

    async def _digest(self, request: Request, item: MediaItem) -> str:
        material = key_material(request, item)
        if body_length(material) <= OFF_LOOP_BYTES:
            return digest(material)
        return await self._loop.run_in_executor(self._threads, digest, material)


def uuids_of(request: Request, digests: dict[int, str]) -> dict[int, str]:
    """Return the uuid of each item: its digest, or a random one when its content is elsewhere."""
    return {
        item.index: digests[item.index] if item.is_inline else secrets.token_hex(16) for item in request.items
    }
