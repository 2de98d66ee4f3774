"""b: our encode worker pushes into a vLLM prefill_decode over ECMooncakeConnector's wire protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.ground import Ground
from tests.interop.mixed_pairs import our_encoder_pair
from tests.interop.suite import DeploymentSuite

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

ROW = Row(letter="b", proxy="epdctl, dynamic", encode="**epdctl**", prefill="vLLM", ec="ECMooncakeConnector")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    async with our_encoder_pair(ground, "b") as pair:
        yield pair


class TestOurEncoderFeedsVllm(DeploymentSuite):
    """Our tower's embeddings in vLLM's language model."""
