"""The EC control messages of vLLM's ECMooncakeConnector (0.32.0 and 0.33.0 speak the same), as plain data.

Rules of this file: no I/O. Foreign bytes become typed values here or a `BadMessage` with a reason. A request
is one JSON object, its `op` names the struct. Unknown fields of requests and replies are ignored, as vLLM
does, so our own extras (`digest`, `fenced`, `failed`, `code`) are harmless there; `docs/wire.md` lists them.
Sizes are bytes, shapes are elements (row major), dtypes are torch names without prefix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from epdctl.domain import TransferId
from epdctl.hosts import is_host

DEFAULT_CONTROL_PORT = 14579
"""What vLLM's `ec_port` defaults to; replica d listens on port + d (at tensor parallel size 1)."""

Identifier = Annotated[str, Meta(min_length=1, max_length=1024)]
_TRANSFER = r"\A[A-Za-z0-9._:=+@~-]{1,1024}\Z"
NewTransfer = Annotated[str, Meta(min_length=1, max_length=1024, pattern=_TRANSFER)]
"""A transfer id that may come into being here: it ends up in logs and in keys, so it is one plain word."""
ReservationText = Annotated[str, Meta(max_length=256)]
ByteCount = Annotated[int, Meta(gt=0, le=2**62)]
Dimension = Annotated[int, Meta(gt=0, le=2**48)]
Shape = Annotated[tuple[Dimension, ...], Meta(min_length=1, max_length=8)]
Port = Annotated[int, Meta(gt=0, le=65535)]

T = TypeVar("T")


_NEW_TRANSFER = re.compile(_TRANSFER)
_ADDRESS = re.compile(r"tcp://(?:\[([^\[\]]*:[^\[\]]*)\]|([^:\[\]]+)):([0-9]{1,5})\Z")


class BadMessage(ValueError):
    """A control message that this protocol does not allow; the text says why and is safe to send back."""


class RefusalCode(StrEnum):
    """Why a consumer of ours refused; an extra field of the reply that vLLM neither sends nor reads."""

    FULL = "full"
    CONTRACT = "contract"
    CONFLICT = "conflict"
    INVALID = "invalid"
    BUSY = "busy"
    SHUTTING_DOWN = "shutting_down"


class ReserveItem(msgspec.Struct, frozen=True, kw_only=True):
    """The item that a producer wants to deliver: `product(shape) * itemsize(dtype) == nbytes`."""

    transfer_id: NewTransfer
    mm_hash: Identifier
    nbytes: ByteCount
    shape: Shape
    dtype: Annotated[str, Meta(max_length=64)]


class CompleteItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished write; `digest` (ours) is the blake3 hex of the bytes that were written."""

    transfer_id: Identifier
    reservation_id: ReservationText
    digest: Annotated[str, Meta(max_length=64)] | None = None


class Peers(msgspec.Struct, frozen=True, tag_field="op", tag="peers"):
    """Ask for the control ports of all ranks of the replica."""


class EventPort(msgspec.Struct, frozen=True, tag_field="op", tag="event_port"):
    """Ask for the port on which ready events are pushed."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="status"):
    """Ask what became of a transfer."""

    transfer_id: Identifier


class Reserve(ReserveItem, frozen=True, kw_only=True, tag_field="op", tag="reserve"):
    """Ask for the space of one item."""


class ReserveBatch(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="reserve_batch"):
    """Ask for the space of several items; each is parsed, and so fails, by itself."""

    items: list[Raw]


class Complete(CompleteItem, frozen=True, kw_only=True, omit_defaults=True, tag_field="op", tag="complete"):
    """Publish one finished write."""


class CompleteBatch(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="complete_batch"):
    """Publish several finished writes; each is parsed by itself."""

    items: list[Raw]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="op", tag="cancel"):
    """Give a transfer up. An empty `reservation_id` matches any.

    `abandon`: the sender states that nobody writes any more, the memory may be reused. `refresh` (only with
    `abandon`): the id stays usable. Ours: `failed`, the writer gave up but its bytes may still land, so
    followers must not wait for it; `fenced`, no byte of this transfer can land any more, so the region needs
    no quarantine.
    """

    transfer_id: Identifier
    reservation_id: ReservationText
    abandon: bool = False
    refresh: bool = False
    failed: bool = False
    fenced: bool = False


Request = Peers | EventPort | Status | Reserve | ReserveBatch | Complete | CompleteBatch | Cancel

OPERATIONS = (
    "peers",
    "event_port",
    "status",
    "reserve",
    "reserve_batch",
    "complete",
    "complete_batch",
    "cancel",
)


class PeersResult(msgspec.Struct, frozen=True):
    """Control ports of all ranks of the replica, on the host that was asked."""

    ports: Annotated[list[Port], Meta(min_length=1)]


class Reservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The consumer's answer to a reserve.

    `dst_session` is a Mooncake session `host:port`, `dst_ptr` a virtual address inside the consumer's arena.
    `write`: this caller writes and completes. `ready`: the item is available already. Neither: somebody else
    is writing it (a follower). `cancelled`: the transfer is no longer wanted.
    """

    reservation_id: str
    dst_session: str
    dst_ptr: int
    nbytes: int
    write: bool
    ready: bool
    cached: bool | UnsetType = UNSET
    cancelled: bool | UnsetType = UNSET

    @property
    def is_cancelled(self) -> bool:
        """Whether the consumer no longer wants this transfer."""
        return self.cancelled is True


class CompleteResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the completion was accepted, and whether it is what made the item available."""

    completed: bool
    became_ready: bool


class CancelResult(msgspec.Struct, frozen=True):
    """Whether the cancel had something to act on, now or later."""

    cancelled: bool


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a live reservation looks like."""

    mm_hash: str
    ready: bool
    reservation_id: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


class ReadyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Pushed to a vLLM scheduler when an item becomes available; `shard` is the sender's control port."""

    transfer_id: str
    mm_hash: str
    ready: bool
    reservation_id: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    shard: int


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """An `ok: false` answer: free text, and a `code` where the consumer is ours."""

    error: str
    code: str | None = None

    @property
    def is_full(self) -> bool:
        """Whether the arena had no space (vLLM has no code for it, only its text)."""
        return self.code == RefusalCode.FULL or "buffer pool is full" in self.error


class _Envelope(msgspec.Struct, frozen=True):
    ok: bool
    result: Raw = Raw(b"null")
    error: str = ""
    code: str | None = None


class _Items(msgspec.Struct, frozen=True):
    items: list[Raw]


class _CompleteResults(msgspec.Struct, frozen=True):
    items: list[CompleteResult]


_ENCODER = msgspec.json.Encoder()
_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAddress:
    """A control address, `tcp://host:port`; an IPv6 literal is bracketed in the text only."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def with_port(self, port: int) -> ControlAddress:
        """Return the address of another rank: ranks share the host and differ by port."""
        return ControlAddress(host=self.host, port=port)


def parse_address(text: str) -> ControlAddress:
    """Return the control address in `text`; raise BadMessage unless it is `tcp://host:port`."""
    match = _ADDRESS.match(text)
    if match is None or not 0 < int(match[3]) <= 65535:
        raise BadMessage("an EC control address must be tcp://host:port with a port from 1 to 65535")
    host = match[1] or match[2]
    if not is_host(host):
        raise BadMessage("an EC control address must be tcp://host:port, the host a name or an IP address")
    return ControlAddress(host=host, port=int(match[3]))


def is_new_transfer_id(text: str) -> bool:
    """Return whether a consumer of ours lets a transfer of this id begin (`NewTransfer`)."""
    return _NEW_TRANSFER.match(text) is not None


def new_transfer_id(randomness: bytes) -> TransferId:
    """Return a transfer id, 32 hex digits, made of 16 random bytes."""
    return TransferId(randomness.hex())


def encode(message: object) -> bytes:
    """Return one message body: a request, an event or a reply."""
    return _ENCODER.encode(message)


def encode_result(result: object) -> bytes:
    """Return the body of a positive reply."""
    return _ENCODER.encode({"ok": True, "result": result})


def encode_refusal(refusal: Refusal) -> bytes:
    """Return the body of a negative reply."""
    return _ENCODER.encode(refusal_body(refusal))


def refusal_body(refusal: Refusal) -> dict[str, object]:
    """Return the envelope of a refusal, as it stands alone or inside a batch."""
    body: dict[str, object] = {"ok": False, "error": refusal.error}
    return body | {"code": refusal.code} if refusal.code is not None else body


def parse_request(body: bytes) -> Request:
    """Return the request in `body`; raise BadMessage with the reason."""
    try:
        return _REQUESTS.decode(body)
    except msgspec.ValidationError as error:
        raise BadMessage(_explain(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage("malformed control request: not a JSON object") from error


def parse_item(raw: Raw, kind: type[T]) -> T:
    """Return one item of a batch as `kind`; raise BadMessage with the reason."""
    item: T = _decode(raw, kind)
    return item


def parse_reply(body: bytes, kind: Any) -> Any:
    """Return the result in a reply as `kind`, or a `Refusal`; raise BadMessage when it is neither."""
    envelope = _decode(body, _Envelope)
    if not envelope.ok:
        return Refusal(envelope.error, envelope.code)
    return _decode(envelope.result, kind)


def parse_reserve_replies(body: bytes) -> list[Reservation | Refusal] | Refusal:
    """Return the answers to a reserve_batch in order; raise BadMessage when they are malformed."""
    items = parse_reply(body, _Items)
    if isinstance(items, Refusal):
        return items
    return [parse_reply(bytes(raw), Reservation) for raw in items.items]


def parse_complete_replies(body: bytes) -> list[CompleteResult] | Refusal:
    """Return the answers to a complete_batch in order; raise BadMessage when they are malformed."""
    results = parse_reply(body, _CompleteResults)
    return results if isinstance(results, Refusal) else results.items


def parse_event(body: bytes) -> ReadyEvent:
    """Return the ready event in `body`; raise BadMessage with the reason."""
    event: ReadyEvent = _decode(body, ReadyEvent)
    return event


def _decode(body: bytes | Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise BadMessage(_explain(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage("malformed control message: not JSON") from error


def _explain(reason: str) -> str:
    if reason.endswith("`$.op`") and reason.startswith("Invalid value"):
        return f"unknown control op; known are {', '.join(OPERATIONS)}"
    return f"malformed control message: {reason}"
