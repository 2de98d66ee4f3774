"""d: vLLM encoder, prefill and decode; KV travels by vLLM's MooncakeConnector.

The reference proxy cannot hand KV over in this style: both legs run at once, under an id of the proxy's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.engines import DECODE_MOONCAKE_KV, PREFILL_MOONCAKE_KV
from tests.interop.ground import Ground
from tests.interop.suite import DeploymentSuite
from tests.interop.vllm_triples import example_triple

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

NAME = "d-mooncake-kv"
ROW = Row(
    letter="d",
    proxy="epdctl, dynamic",
    encode="vLLM",
    prefill="vLLM",
    decode="vLLM",
    ec="ECExampleConnector",
    kv="MooncakeConnector",
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    flags = ("--kv-connector", "mooncake")
    async with example_triple(ground, NAME, *flags, kv=(PREFILL_MOONCAKE_KV, DECODE_MOONCAKE_KV)) as triple:
        yield triple


class TestKvOverMooncake(DeploymentSuite):
    """All three stages are vLLM instances; decode fetches KV from prefill over Mooncake."""
