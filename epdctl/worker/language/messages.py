"""What a language worker's front and its engine say to each other, as bodies of channel messages.

Kinds from the front: `generate` (opens a call), `drop` (one choice of it is over), `cancel` (all of it, no
body). From the engine: `tokens` until every choice has one with `finish`, or `error`.

Rules of this file: plain msgspec structs; the field names are those of the nouns.
"""

from __future__ import annotations

import msgspec

from epdctl.worker.language.params import Sampling
from epdctl.worker.language.positions import Grid


class LanguageEngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is started with; sizes in bytes and tokens, times in seconds."""

    model: str
    dtype: str
    device: str
    threads: int
    step_tokens: int
    sequences: int
    waiting: int
    kv_bytes: int
    ec_ip: str
    ec_port: int
    ec_host: str
    ec_buffer_bytes: int
    mooncake_protocol: str
    mooncake_ports: tuple[int, int] | None
    push_wait_s: float


class ReadyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process says of itself once it can serve."""

    ec_address: str
    kv_tokens: int
    parameters: list[str]


class PromptImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image of the prompt: its run of `rows` placeholder tokens from `offset`, and which push fills it.

    `transfer_id` is None when the request names none: then any resident item with this hash will do.
    """

    mm_hash: str
    transfer_id: str | None
    offset: int
    rows: int
    grid: Grid


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `generate`: one prompt and how to go on with it."""

    token_ids: list[int]
    sampling: Sampling
    images: tuple[PromptImage, ...] = ()


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
    """Body of `tokens`: what engine step number `step` chose for this call."""

    step: int
    tokens: tuple[Token, ...]
