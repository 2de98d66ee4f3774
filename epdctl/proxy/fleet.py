"""Questions to many instances at once: which models there are, and starting or stopping their profilers.

Rules of this file: no cursor moves; instances are asked side by side, each within a deadline of its own, and
one that does not answer only leaves its share out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from epdctl.domain import Role
from epdctl.errors import NoInstance, UpstreamFailed
from epdctl.proxy.connection import CallFailed
from epdctl.proxy.headers import encode_headers
from epdctl.proxy.upstream import Call, UpstreamClient
from epdctl.registry.snapshot import Member, Roster
from epdctl.wire import encode_json

_MODELS_TIMEOUT_S = 5.0
_PROFILE_TIMEOUT_S = 60.0
_MAX_MODELS_BYTES = 4 * 1024 * 1024
_AT_ONCE = 32


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


class Fleet:
    """Asks the ready instances of a roster."""

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def models(self, roster: Roster, authorization: str | None) -> bytes:
        """Return the JSON of `GET /v1/models`: the cards of all instances that answer users, each id once.

        Raises NoInstance when no such instance is ready.
        """
        members = roster.by_role(Role.PREFILL_DECODE) or roster.by_role(Role.DECODE)
        if not members:
            raise NoInstance(Role.DECODE.value, "no ready instance for decode")
        headers = encode_headers([("Authorization", authorization)] if authorization else [])
        call = Call(path="/v1/models", method="GET", headers=headers)
        bodies = await asyncio.gather(*(self._ask(member, call, _MODELS_TIMEOUT_S) for member in members))
        cards = _union(body for status, body in bodies if status == 200)
        for name in sorted({name for member in members for name in member.models or ()}):
            cards.setdefault(name, encode_json({"id": name, "object": "model", "owned_by": "epdctl"}))
        return b'{"object":"list","data":[' + b",".join(cards.values()) + b"]}"

    async def profile(
        self, roster: Roster, path: str, body: bytes, authorization: str | None
    ) -> list[dict[str, Any]]:
        """Post `body` to `path` of every ready instance; return what each answered.

        An instance without the endpoint (404) has its profiler off. Raises NoInstance when there is no
        instance, UpstreamFailed when none has a profiler.
        """
        if not roster.members:
            raise NoInstance(Role.DECODE.value, "no ready instance to profile")
        pairs = [("Content-Type", "application/json")]
        headers = encode_headers([*pairs, ("Authorization", authorization)] if authorization else pairs)
        call = Call(path=path, body=(body,), headers=headers)
        answers = await asyncio.gather(
            *(self._ask(member, call, _PROFILE_TIMEOUT_S) for member in roster.members)
        )
        results = _results(roster.members, [status for status, _ in answers])
        if all(status == 404 for status, _ in answers):
            raise UpstreamFailed("the profiler is off on every instance")
        return results

    async def _ask(self, member: Member, call: Call, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body; status 0 when there was no answer."""
        async with self._places:
            try:
                answer = await self._client.call(
                    member.url, call, timeout_s=timeout_s, limit=_MAX_MODELS_BYTES
                )
            except CallFailed:
                return 0, b""
        return answer.status, answer.body


def _union(bodies: Iterable[bytes]) -> dict[str, bytes]:
    """Return the model cards in `bodies` by id, the first of each; what is not a model list is left out."""
    cards: dict[str, bytes] = {}
    for body in bodies:
        try:
            for raw in msgspec.json.decode(body, type=_Models).data:
                cards.setdefault(msgspec.json.decode(raw, type=_Card).id, bytes(raw))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return cards


def _results(members: Sequence[Member], statuses: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"url": member.url, "role": member.role.value, "status": status or None}
        for member, status in zip(members, statuses, strict=True)
    ]
