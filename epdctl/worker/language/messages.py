"""What a language worker's front and its engine say to each other, as bodies of channel messages.

Kinds from the front: `generate` (opens a call), `drop` (one choice of it is over), `cancel` (all of it, no
body). From the engine: `tokens` until every choice has one with `finish`, or `error`.

Rules of this file: plain msgspec structs; the field names are those of the nouns.
"""

from __future__ import annotations

import msgspec

from epdctl.domain import Modality
from epdctl.worker.language.kv_messages import KvTicket
from epdctl.worker.language.params import Sampling
from epdctl.worker.language.positions import Grid


class EcEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The receiving end of embeddings: where its control socket listens, its memory, how long to wait."""

    ip: str
    port: int
    buffer_bytes: int
    push_wait_s: float


class KvSendEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill's end of KV hand-overs: where its socket listens (port 0: any), how long KV is kept."""

    ip: str
    port: int
    lease_s: float


class KvReceiveEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The decode's end of KV hand-overs: how long to wait for one."""

    wait_s: float


class LanguageEngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is started with; sizes in bytes and tokens, times in seconds.

    `advertise_host` is where peers reach its sockets and Mooncake. The ends that a role has are given.
    """

    model: str
    dtype: str
    device: str
    threads: int
    step_tokens: int
    sequences: int
    waiting: int
    kv_bytes: int
    advertise_host: str
    mooncake_protocol: str
    mooncake_devices: str = ""
    mooncake_ports: tuple[int, int] | None
    ec: EcEnd | None = None
    kv_send: KvSendEnd | None = None
    kv_receive: KvReceiveEnd | None = None


class ReadyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process says of itself once it can serve."""

    ec_address: str | None
    kv_tokens: int
    parameters: list[str]


class PromptImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image or video of the prompt: its `rows` placeholder tokens from `offset`, and which push fills it.

    `transfer_id` is None when the request names none: then any resident item with this hash will do.
    """

    mm_hash: str
    transfer_id: str | None
    offset: int
    rows: int
    grid: Grid
    modality: Modality = Modality.IMAGE


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `generate`: one prompt and how to go on with it.

    With `hold_kv` the prompt's KV is kept for another process, and its ticket comes with the last token; with
    `ticket` the prompt's KV comes from such a process.
    """

    token_ids: list[int]
    sampling: Sampling
    images: tuple[PromptImage, ...] = ()
    hold_kv: bool = False
    ticket: KvTicket | None = None


class Drop(msgspec.Struct, frozen=True):
    """Body of `drop`: this choice needs no more tokens (its text met a stop string)."""

    choice: int


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A chosen token; `top` is (id, logprob), best first. `finish`, on the last one: "stop" or "length"."""

    choice: int
    id: int
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """Body of `tokens`: what engine step number `step` chose for this call; `ticket` of KV that is held."""

    step: int
    tokens: tuple[Token, ...]
    ticket: KvTicket | None = None
