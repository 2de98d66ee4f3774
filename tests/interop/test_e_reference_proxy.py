"""e: vLLM's own example proxy drives our encode and prefill_decode workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.engines import HOST
from tests.interop.evidence import ControlMessages, TransferMetrics
from tests.interop.ground import Ground
from tests.interop.suite import DeploymentSuite
from tests.interop.wiring import control_tap, http_tap
from tests.stubs.ports import free_port

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

NAME = "e"
ROW = Row(
    letter="e",
    proxy="vLLM's reference, static",
    encode="**epdctl**",
    prefill="**epdctl**",
    ec="ECMooncakeConnector",
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, with the reference proxy's static flags; no vLLM instance runs."""
    await ground.fleet.use()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ground.fleet.stop_others)
        ec_port = free_port()
        encode = await ground.fleet.worker("encode", "--allowed-media-domains", HOST)
        consumer = await ground.fleet.worker("prefill-decode", "--ec-ip", HOST, "--ec-port", str(ec_port))
        encoder_tap = await http_tap(stack, "encode", encode.url)
        consumer_tap = await http_tap(stack, "prefill_decode", consumer.url)
        control = await control_tap(stack, f"tcp://{HOST}:{ec_port}")
        proxy = await ground.fleet.reference_proxy(
            *("--encode-servers-urls", encoder_tap.url),
            *("--decode-servers-urls", consumer_tap.url),
            *("--ec-consumer-zmq-addrs", control.address),
        )
        producer, receiver = (
            TransferMetrics(url=encode.url, side="producer"),
            TransferMetrics(url=consumer.url, side="consumer"),
        )
        yield ground.deployment(
            NAME,
            proxy.url,
            encoders=(encoder_tap,),
            consumers=(consumer_tap,),
            witnesses=(ControlMessages(control), producer, receiver),
        )


class TestReferenceProxyDrivesOurWorkers(DeploymentSuite):
    """The same wire, seen from the other side."""
