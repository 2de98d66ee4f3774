"""b: our encode worker pushes into a vLLM prefill_decode over ECMooncakeConnector's wire protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.interop.answers import Answer
from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.engines import ENCODE_MOONCAKE, HOST, PREFILL_DECODE_MOONCAKE
from tests.interop.evidence import ControlMessages, TransferMetrics
from tests.interop.fleet import Fleet
from tests.interop.scenarios import MediaUrl, scenarios
from tests.interop.suite import DeploymentSuite
from tests.interop.wiring import ADMIN_KEY, control_tap, http_tap, register

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

NAME = "b"
ROW = Row(letter="b", proxy="epdctl, dynamic", encode="**epdctl**", prefill="vLLM", ec="ECMooncakeConnector")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(
    fleet: Fleet, plain: dict[str, dict[str, Answer]], media_url: MediaUrl
) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    (consumer,) = await fleet.use(PREFILL_DECODE_MOONCAKE, may_stay=(ENCODE_MOONCAKE,))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.stop_others)
        encode = await fleet.worker("encode", "--allowed-media-domains", HOST)
        encoder_tap = await http_tap(stack, "encode", encode.url)
        consumer_tap = await http_tap(stack, "prefill_decode", consumer.url)
        control = await control_tap(stack, consumer.ec_address)
        proxy = await fleet.serve(NAME, "--dynamic-registration", key=ADMIN_KEY)
        await register(proxy.url, "encode", encoder_tap.url)
        await register(proxy.url, "prefill_decode", consumer_tap.url, control.address)
        yield Deployment(
            name=NAME,
            url=proxy.url,
            encoders=(encoder_tap,),
            consumers=(consumer_tap,),
            witnesses=(ControlMessages(control), TransferMetrics(url=encode.url, side="producer")),
            scenarios=scenarios(NAME, media_url),
            plain=plain[NAME],
        )


class TestOurEncoderFeedsVllm(DeploymentSuite):
    """Our tower's embeddings in vLLM's language model."""
