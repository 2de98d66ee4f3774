"""b: two engines of our encode worker write into the folder from which a vLLM prefill_decode reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.engines import ENCODE_EXAMPLE, HOST, PREFILL_DECODE_EXAMPLE
from tests.interop.evidence import StoredFiles, TransferMetrics
from tests.interop.ground import Ground
from tests.interop.suite import DeploymentSuite
from tests.interop.wiring import ADMIN_KEY, http_tap, register

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

NAME = "b-folder"
ROW = Row(letter="b", proxy="epdctl, dynamic", encode="**epdctl**", prefill="vLLM", ec="ECExampleConnector")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    (consumer,) = await ground.fleet.use(PREFILL_DECODE_EXAMPLE, may_stay=(ENCODE_EXAMPLE,))
    folder = consumer.place.shared_storage
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ground.fleet.stop_others)
        encode = await ground.fleet.worker(
            "encode",
            *("--allowed-media-domains", HOST, "--data-parallel-size", "2"),
            *("--ec-connector", "shared-filesystem", "--shared-storage-path", str(folder)),
        )
        encoder_tap = await http_tap(stack, "encode", encode.url)
        consumer_tap = await http_tap(stack, "prefill_decode", consumer.url)
        proxy = await ground.fleet.serve(NAME, "--dynamic-registration", key=ADMIN_KEY)
        await register(proxy.url, "encode", encoder_tap.url)
        await register(proxy.url, "prefill_decode", consumer_tap.url)
        yield ground.deployment(
            NAME,
            proxy.url,
            encoders=(encoder_tap,),
            consumers=(consumer_tap,),
            witnesses=(StoredFiles(folder, encoder_tap), TransferMetrics(url=encode.url, side="producer")),
        )


class TestOurEncoderFeedsVllmThroughAFolder(DeploymentSuite):
    """Our tower's embeddings, read from files by vLLM's own code."""
