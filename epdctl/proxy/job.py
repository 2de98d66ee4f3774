"""One request on its way through the stages, and one attempt at it.

Rules of this file: a job never changes; an attempt is thrown away whole, and nothing of it reaches the next.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from epdctl.domain import InstanceUrl, TransferId
from epdctl.proxy.content import Request
from epdctl.proxy.headers import RANK_HEADER
from epdctl.proxy.legs import Leases
from epdctl.proxy.parts import MediaItem
from epdctl.proxy.plan import Demand, ItemDemand, RoutePlan
from epdctl.proxy.record import Record
from epdctl.proxy.upstream import json_headers
from epdctl.registry.snapshot import Member


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs on every attempt.

    `uuids` is None with `--no-rewrite`; `item_keys` decide which encoder an item goes to (consistent
    hashing). `headers` are those that every leg carries.
    """

    request: Request
    path: str
    request_id: str
    headers: list[tuple[str, str]]
    record: Record
    affinity: bytes | None = None
    uuids: Mapping[int, str] | None = msgspec.field(default_factory=dict)
    item_keys: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    batch_limit: int = 0

    def demand(self, avoid: frozenset[InstanceUrl], items: Iterable[MediaItem] | None = None) -> Demand:
        """Return what a plan has to provide for, for all items or for `items`."""
        wanted = self.request.items if items is None else items
        return Demand(
            model=self.request.model,
            items=tuple(
                ItemDemand(index=item.index, modality=item.modality, key=self.item_keys.get(item.index, b""))
                for item in wanted
            ),
            affinity=self.affinity,
            avoid=avoid,
            batch_limit=self.batch_limit,
        )

    def leg_headers(self, request_id: str, rank: int | None = None) -> bytes:
        """Return the header lines of one leg; `rank` pins a data-parallel replica."""
        more = self.headers if rank is None else [*self.headers, (RANK_HEADER, str(rank))]
        return json_headers(request_id, more)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One try at a job with one plan.

    `transfer_ids` are those in force, by item; `asked_ids` all that an encoder was told, `abandoned_ids`
    those of calls that were replaced. `is_decode_open` tells that decode has answered: then the engine owns
    the embeddings.
    """

    plan: RoutePlan
    leases: Leases
    transfer_ids: dict[int, tuple[TransferId, ...]] = field(default_factory=dict)
    asked_ids: list[TransferId] = field(default_factory=list)
    abandoned_ids: list[TransferId] = field(default_factory=list)
    is_decode_open: bool = False

    @property
    def unwanted_ids(self) -> list[TransferId]:
        """The transfers that nobody will fetch when the attempt ends as it is."""
        return self.abandoned_ids if self.is_decode_open else self.asked_ids

    @property
    def consumer(self) -> Member:
        """The instance that receives embeddings."""
        return self.plan.prefill or self.plan.decode

    @property
    def consumer_rank(self) -> int | None:
        """The replica to name to the consumer, or None where there is only one."""
        return self.plan.consumer.rank if self.consumer.dp_size > 1 else None

    def mint_transfer_ids(self, items: Iterable[MediaItem]) -> None:
        """Give each feature of `items` a new transfer id: an id that was cancelled once stays so (300 s)."""
        for item in items:
            self.transfer_ids[item.index] = tuple(
                TransferId(secrets.token_hex(16)) for _ in range(item.feature_count)
            )
