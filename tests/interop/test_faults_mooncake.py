"""Deliberate faults between two vLLM instances with Mooncake: the suite must notice each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.interop.ground import Ground
from tests.interop.vllm_pairs import Pair, mooncake_pair

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(ground: Ground) -> AsyncIterator[Pair]:
    """The deployment, and its taps to put faults in."""
    async with mooncake_pair(ground, "faults-mooncake") as pair:
        yield pair


async def test_a_differing_token_is_noticed(pair: Pair) -> None:
    """One changed letter in what the consumer answers fails the request."""
    right = pair.deployment.plain["one_image"].text.encode()
    pair.consumer.distort = lambda chunk: chunk.replace(right, right[:-1] + b"?")
    try:
        problems = await pair.deployment.judge("one_image")
    finally:
        pair.consumer.distort = None

    assert len(problems) == 1
    assert "instead of" in problems[0]


async def test_a_missing_transfer_is_noticed(pair: Pair) -> None:
    """An embedding whose completion is lost fails the request, on the wire and in the answer."""
    assert pair.control is not None
    pair.control.lose = frozenset({"complete", "complete_batch"})
    try:
        problems = await pair.deployment.judge("client_uuid")
    finally:
        pair.control.lose = frozenset()

    assert "0 transfers were completed, not 1" in problems
    assert any(problem.startswith("status 5") or "instead of" in problem for problem in problems)


async def test_the_deployment_recovers(pair: Pair) -> None:
    """With the faults gone the same deployment passes again."""
    assert await pair.deployment.judge("two_images") == []
