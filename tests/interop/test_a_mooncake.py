"""a: vLLM encoder and vLLM prefill_decode behind `epdctl serve`, embeddings pushed over TCP by Mooncake."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.ground import Ground
from tests.interop.suite import DeploymentSuite
from tests.interop.vllm_pairs import mooncake_pair

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

ROW = Row(letter="a", proxy="epdctl, static", encode="vLLM", prefill="vLLM", ec="ECMooncakeConnector")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, with static URLs."""
    async with mooncake_pair(ground, "a-mooncake") as pair:
        yield pair.deployment


class TestVllmBehindEpdctl(DeploymentSuite):
    """Pushed embeddings between two vLLM instances."""
