"""How a stub misbehaves: the vocabulary of the case files, read strictly.

Rules of this file: pure; a word that is not in the vocabulary raises UnknownBehaviour by name.

Top level: `health`, `chat` (any generation route), `validate`, `keepalive_s`, `close_silently`, `models`,
`base_path`, `bind`, `read_bytes_per_s`, `listen_backlog_full`, `zmq_behaviour` (stub consumers only).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

DEFAULT = "default"
ENDS = frozenset({"clean", "reset", "hang"})
FAILS = frozenset(
    {"refuse", "reset_before_body", "reset_after_body", "reset_after_headers", "reset_after_chunk"}
)


class UnknownBehaviour(ValueError):
    """A key or value that the vocabulary does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How `/health` answers: a status, never, or one status a call (the last repeats)."""

    status: int = 200
    hang: bool = False
    sequence: tuple[int, ...] = ()

    def status_of(self, call: int) -> int:
        """Return the status of the `call`-th probe, from 0."""
        return self.sequence[min(call, len(self.sequence) - 1)] if self.sequence else self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """How a generation route answers; with nothing set it is the right answer of the role."""

    status: int | None = None
    json: Any = None
    text: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    sse: tuple[str, ...] | None = None
    sse_b64: tuple[str, ...] | None = None
    gap_ms: float = 0
    chunks: int | None = None
    delay_ms: float = 0
    hang: bool = False
    headers_then_hang: bool = False
    end: str = "clean"
    fail: str | None = None
    sequence: tuple[Chat, ...] = ()
    sequence_cycle: tuple[Chat, ...] = ()
    kv_transfer_params: Any = None
    has_kv_transfer_params: bool = False
    usage: Any = None
    json_extra: Mapping[str, Any] = field(default_factory=dict)
    gzip: bool = False
    echo_prompt: bool = False
    delay_by_image_ms: Mapping[str, float] = field(default_factory=dict)

    def for_call(self, call: int) -> Chat:
        """Return what the `call`-th request gets, from 0; a sequence ends in the right answer."""
        if self.sequence_cycle:
            return self.sequence_cycle[call % len(self.sequence_cycle)].for_call(0)
        if self.sequence:
            return self.sequence[call].for_call(0) if call < len(self.sequence) else Chat()
        return self

    def stream_pieces(self, fill: Callable[[str], str] = str) -> list[bytes] | None:
        """Return the pieces a scripted stream writes, placeholders filled in, or None without a script."""
        if self.sse is not None:
            return [fill(piece).encode() for piece in self.sse]
        if self.sse_b64 is not None:
            return [_filled_bytes(base64.b64decode(piece), fill) for piece in self.sse_b64]
        return None


def _filled_bytes(piece: bytes, fill: Callable[[str], str]) -> bytes:
    if b"{{" not in piece:
        return piece
    return fill(piece.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Everything a stub instance can be told."""

    health: Health = Health()
    chat: Chat = Chat()
    validate: str | None = None
    keepalive_s: float | None = None
    close_silently: bool = False
    models: tuple[str, ...] = ()
    base_path: str = ""
    bind: str = "127.0.0.1"
    read_bytes_per_s: int | None = None
    listen_backlog_full: bool = False
    zmq_behaviour: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accepts_connections(self) -> bool:
        """Whether a connection can be made at all."""
        return not self.listen_backlog_full and self.chat.for_call(0).fail != "refuse"


def parse_behaviour(value: Mapping[str, Any]) -> Behaviour:
    """Return the behaviour a case or test describes; raise UnknownBehaviour naming what is not known."""
    known = dict(value)
    if "health" in known:
        known["health"] = parse_health(known["health"])
    if "chat" in known:
        known["chat"] = parse_chat(known["chat"])
    if "models" in known:
        known["models"] = tuple(known["models"])
    if known.get("validate") not in (None, "vllm"):
        raise UnknownBehaviour(f"validate: {known['validate']!r}")
    return Behaviour(**_checked(Behaviour, known, "behaviour"))


def parse_health(value: Any) -> Health:
    """Return a health script from `{status}`, `{hang}` or `{sequence}`."""
    known = dict(value)
    if "sequence" in known:
        known["sequence"] = tuple(known["sequence"])
    return Health(**_checked(Health, known, "health"))


def parse_chat(value: Any) -> Chat:
    """Return a chat script; the word `default` is the right answer."""
    if value == DEFAULT or value is None:
        return Chat()
    known = dict(value)
    for key in ("sequence", "sequence_cycle"):
        if key in known:
            known[key] = tuple(parse_chat(entry) for entry in known[key])
    for key in ("sse", "sse_b64"):
        if known.get(key) is not None:
            known[key] = tuple(known[key])
    if "kv_transfer_params" in known:
        known["has_kv_transfer_params"] = True
    if known.get("end", "clean") not in ENDS:
        raise UnknownBehaviour(f"chat.end: {known['end']!r}")
    if known.get("fail") is not None and known["fail"] not in FAILS:
        raise UnknownBehaviour(f"chat.fail: {known['fail']!r}")
    return Chat(**_checked(Chat, known, "chat"))


def _checked(kind: type[Any], value: dict[str, Any], where: str) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    unknown = [key for key in value if key not in names]
    if unknown:
        raise UnknownBehaviour(f"{where}.{unknown[0]}")
    return value
