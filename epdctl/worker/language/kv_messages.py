"""What prefill and decode say to each other about a prompt's KV.

A finished prefill answers with a ticket (`kv_transfer_params`, in the style of vLLM's NIXL connector), which
the proxy hands to decode word for word. Decode shows it at the prefill's KV socket with the address of its
own reservation; prefill writes there over Mooncake and answers with a digest. Mooncake has no read that can
be polled, so it is the owner of the bytes who writes.

    {"op": "fetch", "kv_id", "session", "address", "capacity"} -> {"ok": true, "result": {"digest", "nbytes"}}
    {"op": "release", "kv_id"}                                 -> {"ok": true, "result": {"released"}}
    anything that does not work                                -> {"ok": false, "error", "code"}

Rules of this file: no I/O; foreign bytes become typed values or `BadKvMessage`. One JSON object, one frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import blake3
import msgspec
from msgspec import Meta

from epdctl.errors import InvalidRequest

Identifier = Annotated[str, Meta(min_length=1, max_length=256)]
Positive = Annotated[int, Meta(gt=0, le=2**48)]


class BadKvMessage(ValueError):
    """A message that is not in this protocol; the text is safe to send back."""


class KvShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one token's KV is: both ends must have the same. `dtype` is a torch name without prefix."""

    layers: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: Annotated[str, Meta(max_length=32)]


class KvTicket(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params` of a prefill: where a prompt's KV waits, for how long, and what it is.

    `prompt_digest` is that of the prompt's token ids: decode takes no KV of another prompt.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: Identifier
    remote_request_id: Identifier
    remote_host: Identifier
    remote_port: Annotated[int, Meta(gt=0, le=65535)]
    remote_num_tokens: Positive
    lease_s: float
    kv_shape: KvShape
    prompt_digest: Identifier


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="fetch"):
    """Write the KV to a region of `capacity` tokens at `address` of Mooncake session `session`."""

    kv_id: Identifier
    session: Identifier
    address: Annotated[int, Meta(gt=0)]
    capacity: Positive


class Release(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="release"):
    """Nobody will fetch it."""

    kv_id: Identifier


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """The KV has been written; `digest` is the blake3 hex of its `nbytes` bytes, layer by layer."""

    digest: str
    nbytes: int


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there was something to release."""

    released: bool


class RefusalCode(StrEnum):
    """Why KV was not written. `unknown`, `busy`: and nothing will be. `failed`: a part may still land."""

    UNKNOWN = "unknown"
    BUSY = "busy"
    FAILED = "failed"
    INVALID = "invalid"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A negative answer."""

    error: str
    code: RefusalCode = RefusalCode.FAILED


class _Envelope(msgspec.Struct):
    ok: bool
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    code: RefusalCode = RefusalCode.FAILED


_REQUESTS = msgspec.json.Decoder(Fetch | Release)


def parse_request(body: bytes) -> Fetch | Release:
    """Return the request in one frame; raises BadKvMessage."""
    try:
        return _REQUESTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadKvMessage(f"not a KV request: {error}") from error


def encode_request(request: Fetch | Release) -> bytes:
    """Return a request's frame."""
    return msgspec.json.encode(request)


def encode_reply(result: Fetched | Released | Refusal) -> bytes:
    """Return an answer's frame."""
    if isinstance(result, Refusal):
        return msgspec.json.encode({"ok": False, "error": result.error, "code": result.code})
    return msgspec.json.encode({"ok": True, "result": result})


def parse_fetched(body: bytes) -> Fetched | Refusal:
    """Return the answer to a fetch; raises BadKvMessage."""
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
        if not envelope.ok:
            return Refusal(error=envelope.error, code=envelope.code)
        return msgspec.json.decode(envelope.result, type=Fetched)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadKvMessage(f"not an answer to a fetch: {error}") from error


def parse_ticket(params: Any) -> KvTicket:
    """Return the ticket in a request's `kv_transfer_params`; raises InvalidRequest."""
    try:
        return msgspec.convert(params, KvTicket)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"kv_transfer_params are not those of an epdctl prefill worker: {error}",
            param="kv_transfer_params",
        ) from error


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Return the digest of a prompt's ids."""
    packed = b"".join(token.to_bytes(8, "little") for token in token_ids)
    return blake3.blake3(packed).hexdigest()
