"""a: vLLM encoder and vLLM prefill_decode behind `epdctl serve`, embeddings through a shared folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.ground import Ground
from tests.interop.suite import DeploymentSuite
from tests.interop.vllm_pairs import example_pair

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

ROW = Row(letter="a", proxy="epdctl, dynamic", encode="vLLM", prefill="vLLM", ec="ECExampleConnector")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    async with example_pair(ground, "a-example") as pair:
        yield pair.deployment


class TestVllmBehindEpdctl(DeploymentSuite):
    """Embeddings written and read by two vLLM instances."""
