"""Proof that an embedding came through the EC connector: what was seen on the wire, on disk, and in metrics.

Rules of this file: each check returns what is wrong as sentences, an empty list when all is well; nothing
here compares answers, a right answer is no proof of the way it took."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from tests.interop.control_tap import ControlExchange, ControlTap
from tests.interop.scenarios import Scenario
from tests.interop.tap import Exchange, HttpTap

PIXELS = re.compile(rb'"(image_url|input_image|image_pil)"|data:image/|/media/')


def content_parts(body: Any) -> Iterator[dict[str, Any]]:
    """Yield the content parts of a chat request."""
    for message in body["messages"]:
        content = message.get("content")
        yield from content if isinstance(content, list) else ()


def parts_of_type(body: Any, kind: str) -> list[dict[str, Any]]:
    """Return a chat request's content parts of one type."""
    return [part for part in content_parts(body) if part.get("type") == kind]


def encoder_problems(calls: Iterable[Exchange], scenario: Scenario) -> list[str]:
    """Check that encoders were sent all images, and only images."""
    bodies = [call.request_json() for call in calls]
    images = sum(len(parts_of_type(body, "image_url")) for body in bodies)
    problems = []
    if images < scenario.images:
        problems.append(f"encoders were sent {images} images of {scenario.images}")
    if any(parts_of_type(body, "text") for body in bodies):
        problems.append("an encoder was sent text")
    return problems


def consumer_problems(calls: list[Exchange], scenario: Scenario) -> list[str]:
    """Check that the consumer of embeddings, and every stage behind it, got metadata and no pixels."""
    problems = [] if calls else ["the consumer was not called"]
    for call in calls:
        found = len(parts_of_type(call.request_json(), "image_embeds"))
        if found != scenario.images:
            problems.append(f"{call.hop} was sent {found} image_embeds parts of {scenario.images}")
        if PIXELS.search(call.request_body):
            problems.append(f"{call.hop} was sent a picture")
    return problems


class Evidence(Protocol):
    """One more witness: `mark` before a request, `problems` after it."""

    async def mark(self) -> None:
        """Remember how things stand."""

    async def problems(self, scenario: Scenario) -> list[str]:
        """Return what contradicts that the scenario's embeddings came by the connector."""


class StoredFiles:
    """ECExampleConnector's folder: a new file for each different image, named as the encoder reported."""

    def __init__(self, folder: Path, encoder: HttpTap) -> None:
        self._folder = folder
        self._encoder = encoder
        self._before: set[str] = set()

    def _stored(self) -> set[str]:
        return {file.parent.name for file in self._folder.glob("*/encoder_cache.safetensors")}

    async def mark(self) -> None:
        """Remember which embeddings there are."""
        self._before = self._stored()

    async def problems(self, scenario: Scenario) -> list[str]:
        """Check that what is new are the identifiers that the encoder reported, one for each image."""
        new = self._stored() - self._before
        wanted = scenario.distinct_images
        problems = [] if len(new) == wanted else [f"{len(new)} embeddings were stored, not {wanted}"]
        if new - self._reported():
            problems.append("an embedding was stored that the encoder did not report")
        return problems

    def _reported(self) -> set[str]:
        answers = [call.response_json() for call in self._encoder.calls if call.status == 200]
        return {identifier for answer in answers for identifier in answer["ec_transfer_params"]}


class ControlMessages:
    """A Mooncake consumer's control channel: a completed delivery for each different image."""

    def __init__(self, tap: ControlTap) -> None:
        self._tap = tap
        self._mark = 0

    async def mark(self) -> None:
        """Remember how many exchanges there were."""
        self._mark = len(self._tap.exchanges)

    async def problems(self, scenario: Scenario) -> list[str]:
        """Check that every different image was reserved for and its write completed."""
        seen = self._tap.exchanges[self._mark :]
        wanted = scenario.distinct_images
        problems = []
        if granted(seen) < wanted:
            problems.append(f"{granted(seen)} reservations were granted, not {wanted}")
        if completed(seen) < wanted:
            problems.append(f"{completed(seen)} transfers were completed, not {wanted}")
        return problems


def granted(seen: Iterable[ControlExchange]) -> int:
    """Return how many reservations told their producer to write."""
    return sum(item["write"] for e in seen for item in _results(e, "reserve", "reserve_batch"))


def completed(seen: Iterable[ControlExchange]) -> int:
    """Return how many writes were completed."""
    return sum(item["completed"] for e in seen for item in _results(e, "complete", "complete_batch"))


def _results(exchange: ControlExchange, single: str, batch: str) -> list[dict[str, Any]]:
    operation, reply = exchange.request["op"], exchange.reply
    if not reply.get("ok") or operation not in (single, batch):
        return []
    if operation == single:
        return [reply["result"]]
    # A batch of reservations wraps each in an envelope of its own; a batch of completions does not.
    items = reply["result"]["items"]
    return [item.get("result", item) for item in items if item.get("ok", True)]


@dataclass(slots=True, kw_only=True)
class TransferMetrics:
    """A bundled worker's own counters: one delivery and some bytes for each different image."""

    url: str
    side: str
    _transfers: float = 0.0
    _bytes: float = 0.0

    async def _read(self) -> tuple[float, float]:
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{self.url}/metrics") as answer,
        ):
            text = await answer.text()
        return (
            counter(text, "epdctl_ec_transfers_total", side=self.side, outcome="delivered"),
            counter(text, "epdctl_ec_bytes_total", side=self.side),
        )

    async def mark(self) -> None:
        """Remember the counters."""
        self._transfers, self._bytes = await self._read()

    async def problems(self, scenario: Scenario) -> list[str]:
        """Check that the counters moved by at least the scenario's different images."""
        transfers, moved = await self._read()
        wanted = scenario.distinct_images
        problems = []
        if transfers - self._transfers < wanted:
            problems.append(f"{self.side} counts {transfers - self._transfers:.0f} transfers, not {wanted}")
        if wanted and moved <= self._bytes:
            problems.append(f"{self.side} counts no bytes moved")
        return problems


def counter(text: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's series that carry `labels`, from an exposition text."""
    total = 0.0
    for match in re.finditer(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE):
        if all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total
