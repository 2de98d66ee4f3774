"""Deliberate faults between two vLLM instances with a shared folder: the suite must notice each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.interop.ground import Ground
from tests.interop.vllm_pairs import Pair, example_pair

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def raw_pair(ground: Ground) -> AsyncIterator[Pair]:
    """A proxy that leaves pictures in the consumer's request, which then encodes them itself."""
    async with example_pair(ground, "faults-example", "--no-rewrite") as pair:
        yield pair


async def test_a_locally_encoded_image_is_noticed(raw_pair: Pair) -> None:
    """A consumer that encodes the picture itself answers right, and fails the request all the same."""
    problems = await raw_pair.deployment.judge("one_image")

    assert "prefill_decode was sent a picture" in problems
    assert not any("instead of" in problem for problem in problems)


async def test_an_embedding_that_was_not_stored_is_noticed(raw_pair: Pair) -> None:
    """A request that stores no new embedding is not taken for one that did."""
    await raw_pair.deployment.judge("two_images")
    problems = await raw_pair.deployment.judge("two_images")

    assert "0 embeddings were stored, not 2" in problems
