"""The request that asks an encoder for some media items of a client's request.

Rules of this file: pure. The shape is vLLM's (0.32, 0.33): one user message that holds only the media, the
options that change an embedding, and where to push. Media are the client's bytes, spliced in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw

from epdctl.domain import TransferId
from epdctl.proxy.content import Request
from epdctl.proxy.cut import Body
from epdctl.proxy.parts import MediaItem
from epdctl.proxy.slices import write_list, write_object

COPIED_FIELDS = ("mm_processor_kwargs", "media_io_kwargs", "priority", "session_id")
"""What an encoder must know besides the media: it changes the embedding, or where it waits in the queue."""

_encode = msgspec.json.Encoder().encode


def build_encode_body(
    request: Request,
    items: Sequence[MediaItem],
    *,
    uuids: Mapping[int, str] | None,
    transfer_ids: Mapping[int, tuple[TransferId, ...]],
    consumer_zmq: str | None,
) -> Body:
    """Return the body of one encoder call for `items`, in prompt order.

    `uuids` and `transfer_ids` are by item index. Without `uuids` (no rewriting) the encoder derives its own
    identifier, as the consumer will. Without `consumer_zmq` nothing is pushed, so nothing is said about it.
    """
    parts = [write_part(item, uuids[item.index] if uuids is not None else None) for item in items]
    fields: dict[str, Raw | bytes] = {}
    if "model" in request.fields:
        fields["model"] = request.fields["model"]
    fields["messages"] = b'[{"role":"user","content":' + write_list(parts) + b"}]"
    fields["stream"] = b"false"
    for name in COPIED_FIELDS:
        if name in request.fields:
            fields[name] = request.fields[name]
    if consumer_zmq is not None:
        wanted = [{"transfer_id": id_} for item in items for id_ in transfer_ids[item.index]]
        fields["ec_transfer_params"] = _encode({"consumer_zmq": consumer_zmq, "ec_items": wanted})
    return request.cut.restore(write_object(fields))


def write_part(item: MediaItem, uuid: str | None) -> bytes:
    """Return the item's part as JSON in skeleton space, with our uuid or none in place of the client's."""
    if uuid is None:
        return write_object(item.fields)
    return write_object({**item.fields, "uuid": _encode(uuid)})
