"""c: a vLLM encoder pushes into our prefill_decode worker over ECMooncakeConnector's wire protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.ground import Ground
from tests.interop.mixed_pairs import our_prefill_decode_pair
from tests.interop.suite import DeploymentSuite

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

ROW = Row(letter="c", proxy="epdctl, dynamic", encode="vLLM", prefill="**epdctl**", ec="ECMooncakeConnector")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    async with our_prefill_decode_pair(ground, "c") as pair:
        yield pair


class TestVllmFeedsOurLanguageWorker(DeploymentSuite):
    """vLLM's embeddings in our language worker."""
