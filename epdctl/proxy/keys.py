"""What the proxy calls a media item: the uuid that goes, the same, to both halves of a request.

Rules of this file:
- Pure. A uuid is derived from all that can change the embedding: the part with its media, the modality, the
  processing options of the request, and the client's own uuid. A client's uuid alone is never an identity,
  or one client could read another one's picture.
- A URL is not its content: media behind a URL get a random uuid, handed in, and are cached by the worker that
  fetched them.
- Components are length-prefixed, so that no two different items share a digest by shifting text.
"""

from __future__ import annotations

from blake3 import blake3

from epdctl.proxy.content import Request
from epdctl.proxy.cut import Body, Piece
from epdctl.proxy.parts import MediaItem
from epdctl.proxy.slices import write_object

OFF_LOOP_BYTES = 256 * 1024
"""Larger material is hashed off the event loop; blake3 lets go of the interpreter while it works."""

_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")


def key_material(request: Request, item: MediaItem) -> Body:
    """Return the bytes that identify `item`: slices of the client's body, in a fixed order."""
    material: list[Piece] = [item.modality.encode()]
    for text in (write_object(item.fields), item.client_uuid, *_options(request)):
        pieces = request.cut.restore(text)
        material.append(sum(map(len, pieces)).to_bytes(8, "big"))
        material.extend(pieces)
    return tuple(material)


def _options(request: Request) -> list[bytes]:
    return [bytes(request.fields[name]) if name in request.fields else b"" for name in _OPTIONS]


def digest(material: Body) -> str:
    """Return the blake3 digest of `material`, 64 hex digits (a safe file name for vLLM's folder store)."""
    hasher = blake3()
    for piece in material:
        hasher.update(piece)
    return hasher.hexdigest()
