"""d: vLLM encoder, prefill and decode behind `epdctl serve`; KV travels from prefill to decode by NIXL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.interop.answers import ask
from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.engines import DECODE_NIXL, PREFILL_NIXL
from tests.interop.ground import Ground
from tests.interop.suite import DeploymentSuite
from tests.interop.vllm_triples import example_triple

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

NAME = "d"
ROW = Row(
    letter="d",
    proxy="epdctl, dynamic",
    encode="vLLM",
    prefill="vLLM",
    decode="vLLM",
    ec="ECExampleConnector",
    kv="NixlConnector",
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    async with example_triple(ground, NAME, kv=(PREFILL_NIXL, DECODE_NIXL)) as triple:
        yield triple


class TestVllmBehindEpdctl(DeploymentSuite):
    """All three stages are vLLM instances; embeddings go through a shared folder."""

    async def test_decode_gets_what_prefill_handed_over(self, deployment: Deployment) -> None:
        """Decode is sent prefill's KV parameters as prefill gave them, and prefill makes one token."""
        prefill, decode = deployment.consumers
        for tap in (prefill, decode):
            tap.exchanges.clear()
        await ask(deployment.url, deployment.scenarios["one_image"].body)
        (first,), (second,) = prefill.calls, decode.calls

        handed_over = first.response_json()["kv_transfer_params"]
        assert handed_over == second.request_json()["kv_transfer_params"]
        assert (handed_over["do_remote_prefill"], first.request_json()["max_tokens"]) == (True, 1)
