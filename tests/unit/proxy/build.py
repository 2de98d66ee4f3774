"""What the proxy's unit tests share: bodies, members, and the checks on what comes out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from epdctl.domain import InstanceUrl, Role, Topology, TransferId
from epdctl.proxy.content import Limits, Request, parse_chat, parse_completion
from epdctl.proxy.cut import Body
from epdctl.proxy.encode_reply import EncodeReport, read_encode_reply
from epdctl.proxy.rewrite import Encoded, gather_reports
from epdctl.registry.snapshot import Member, Roster

TOKEN = b"0f9c2d4be1a75836" * 2
LIMITS = Limits(max_items=64, max_json_depth=64)
LONG_URL = "data:image/png;base64," + "A" * 4000


def body_of(value: Any) -> bytes:
    """Return `value` as a client would send it."""
    return json.dumps(value).encode()


def chat(value: Any, limits: Limits = LIMITS) -> Request:
    """Parse a chat request given as a value or as bytes."""
    return parse_chat(value if isinstance(value, bytes) else body_of(value), limits, TOKEN)


def completion(value: Any) -> Request:
    """Parse a completion request given as a value."""
    return parse_completion(body_of(value), LIMITS, TOKEN)


def user(*parts: Any, **fields: Any) -> dict[str, Any]:
    """Return a chat request with one user message of `parts`."""
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}


def image(url: str = LONG_URL, **fields: Any) -> dict[str, Any]:
    """Return an image part."""
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def text(words: str = "what is this?") -> dict[str, Any]:
    """Return a text part."""
    return {"type": "text", "text": words}


def sent(body: Body) -> Any:
    """Return the JSON that `body` carries."""
    return json.loads(b"".join(body))


def member(name: str, role: Role, **fields: Any) -> Member:
    """Return a ready member called `name`."""
    return Member(url=InstanceUrl(f"http://{name}"), role=role, generation=1, **fields)


def roster(*members: Member) -> Roster:
    """Return a roster of `members`."""
    return Roster(version=1, topology=Topology.INCOMPLETE, members=members)


def ids_for(request: Request) -> dict[int, tuple[TransferId, ...]]:
    """Return a transfer id for each feature, named after its place."""
    return {
        item.index: tuple(TransferId(f"t{item.index}.{slot}") for slot in range(item.feature_count))
        for item in request.items
    }


def uuids_for(request: Request) -> dict[int, str]:
    """Return a uuid for each item, named after its place."""
    return {item.index: f"uuid-{item.index}" for item in request.items}


def read_reply(
    request: Request, entries: Any, *, items: Sequence[int] | None = None, is_pushed: bool = True
) -> EncodeReport:
    """Read an encoder's reply with `entries` as its `ec_transfer_params`."""
    wanted = request.items if items is None else [request.items[index] for index in items]
    return read_encode_reply(
        body_of({"id": "x", "ec_transfer_params": entries}),
        wanted,
        uuids=uuids_for(request),
        transfer_ids=ids_for(request),
        is_pushed=is_pushed,
    )


def encode(request: Request, metadata: Mapping[int, Any] | None = None) -> Encoded:
    """Return what encoders report when each item is asked for by itself; `metadata` overrides by item."""
    reports = []
    for item in request.items:
        told = (metadata or {}).get(item.index, {f"{item.modality}_grid_thw": [[1, 4, 6]]})
        entry = {"item_indices": [0], "metadata": told, "modality": item.modality.value}
        reports.append(read_reply(request, {f"hash-{item.index}": entry}, items=[item.index]))
    return gather_reports(reports, ids_for(request), uuids_for(request))
