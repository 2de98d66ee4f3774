"""How the KV cache of a prompt gets from prefill to decode: what each of the two is told.

Rules of this file: pure; one class per connector, chosen per pair of instances. `nixl` is vLLM's default
style: prefill first, its parameters go to decode word for word. `mooncake` is vLLM's MooncakeConnector: both
legs at once, a transfer id of ours and the prefill's bootstrap address to decode (0.32; it returns nothing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Raw

from epdctl.errors import UpstreamProtocol
from epdctl.proxy.slices import NULL, first_byte
from epdctl.registry.snapshot import Member

NIXL, MOONCAKE = "nixl", "mooncake"
TRANSFER_PREFIX = "xfer-"

_encode = msgspec.json.Encoder().encode


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: Raw = Raw(NULL)


_PREFILL_REPLY = msgspec.json.Decoder(_PrefillReply)


class KvHandoff(Protocol):
    """One request's hand-off; `is_concurrent` tells that decode starts beside prefill."""

    @property
    def is_concurrent(self) -> bool:
        """Whether both legs run at once."""
        ...

    def prefill_params(self) -> bytes:
        """Return `kv_transfer_params` (JSON) for prefill."""
        ...

    def decode_params(self, prefill_reply: bytes | None) -> bytes | None:
        """Return `kv_transfer_params` (JSON) for decode, or None when prefill handed nothing over.

        Raises UpstreamProtocol when the prefill's answer is not one.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlHandoff:
    """Prefill answers with parameters that decode gets as they are."""

    is_concurrent: bool = False

    def prefill_params(self) -> bytes:
        """Ask for a remote decode."""
        return (
            b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
            b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
        )

    def decode_params(self, prefill_reply: bytes | None) -> bytes | None:
        """Return what prefill answered; absent, null and empty mean that there is nothing to fetch."""
        return read_kv_params(prefill_reply or b"{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeHandoff:
    """Both legs know the transfer id; decode finds the prefill engine by its bootstrap address."""

    transfer_id: str
    engine_id: str
    bootstrap_addr: str
    is_concurrent: bool = True

    def prefill_params(self) -> bytes:
        """Ask for a remote decode under our transfer id."""
        return _encode(
            {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self.transfer_id}
        )

    def decode_params(self, prefill_reply: bytes | None) -> bytes | None:
        """Name the prefill engine and the transfer; the prefill's answer holds nothing for decode."""
        return _encode(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": self.engine_id,
                "remote_bootstrap_addr": self.bootstrap_addr,
                "transfer_id": self.transfer_id,
            }
        )


def read_kv_params(prefill_reply: bytes) -> bytes | None:
    """Return `kv_transfer_params` of a prefill's answer word for word; None when absent, null or empty."""
    try:
        raw = _PREFILL_REPLY.decode(prefill_reply).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamProtocol("the prefill's answer is not a completion") from error
    if bytes(raw) == NULL:
        return None
    if first_byte(raw) != b"{":
        raise UpstreamProtocol("the prefill's kv_transfer_params are not an object")
    return bytes(raw) if bytes(raw)[1:-1].strip() else None


def connector_of(prefill: Member, decode: Member, default: str) -> str:
    """Return the KV connector of a pair: what the instances say, else the default."""
    return prefill.kv_connector or decode.kv_connector or default


def read_engine_id(bootstrap_reply: bytes, rank: int) -> str:
    """Return the id of the engine that serves `rank`, from a MooncakeConnector's `GET /query` (0.32).

    Raises UpstreamProtocol when the answer does not name it.
    """
    try:
        engines = msgspec.json.decode(bootstrap_reply, type=dict[str, dict[str, Raw]])
        return str(msgspec.json.decode(engines[str(rank)]["engine_id"], type=str))
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise UpstreamProtocol("the prefill's bootstrap server did not name its engine") from error
