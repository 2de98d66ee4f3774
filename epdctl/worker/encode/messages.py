"""What the encode worker's front and its engine say to each other, one call per item.

    front -> engine   `encode` (Ask), then, when asked, `pixels` (Pixels + one frame of float32 values);
                      `cancel` when the call is left
    engine -> front   `send_pixels`: not cached and not under way, decode the picture now;
                      `done` (Done), or `error`: the end of the call

Rules of this file: plain structs. Sizes are bytes, rows and widths elements.
"""

from __future__ import annotations

from typing import Any

import msgspec

from epdctl.worker.encode.layout import ItemLayout


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The shared store: its master, memory lent to it, memory to read through, seconds of a look-up."""

    address: str
    segment_bytes: int
    buffer_bytes: int
    timeout_s: float


class EncodeEngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one encode engine process."""

    folder: str
    dtype: str
    device: str
    threads: int
    compile: bool = False
    arena: str = "host"
    """Where the memory of `cache_bytes` lies: host, or device (that of `device`)."""
    cache_bytes: int
    max_batch_tokens: int
    max_batch_items: int
    max_asked: int
    max_pending_pixel_bytes: int
    reply_after: str
    shared_storage_path: str | None = None
    """Folder to write embeddings into; None pushes them over Mooncake."""
    host: str
    mooncake_protocol: str
    mooncake_devices: str = ""
    transfer_timeout_s: float = 8.0
    cache_dram_bytes: int = 0
    store: StoreSettings | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Encode one item and push it to `consumer_zmq` under these names; no consumer: only encode."""

    key: str
    mm_hash: str
    transfer_id: str | None = None
    consumer_zmq: str | None = None


class Pixels(msgspec.Struct, frozen=True, kw_only=True):
    """How the item in the message's frame is laid out."""

    layout: ItemLayout


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The item is encoded, and pushed if a consumer was named (unless the reply does not wait for that).

    `metadata` is the layout's; `transfer_id` is the one it was delivered under; `source` tells a cache hit
    from a forward.
    """

    rows: int
    metadata: dict[str, Any]
    transfer_id: str | None = None
    source: str = "encoded"


class ReadyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine tells its front."""

    model_type: str
    model_identity: str
    dtype: str
    width: int
    parameters: list[str]
    session: str
