"""d: vLLM encoder, prefill and decode; embeddings are pushed to prefill, KV travels by NIXL.

The reference proxy refuses this combination, epdctl does not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.engines import DECODE_NIXL, ENCODE_MOONCAKE, PREFILL_NIXL_MOONCAKE
from tests.interop.evidence import ControlMessages
from tests.interop.ground import Ground
from tests.interop.suite import DeploymentSuite
from tests.interop.wiring import control_tap, http_tap

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

NAME = "d-mooncake"
ROW = Row(
    letter="d",
    proxy="epdctl, static",
    encode="vLLM",
    prefill="vLLM",
    decode="vLLM",
    ec="ECMooncakeConnector",
    kv="NixlConnector",
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deployment(ground: Ground) -> AsyncIterator[Deployment]:
    """The deployment, with static URLs."""
    encode, prefill, decode = await ground.fleet.use(ENCODE_MOONCAKE, PREFILL_NIXL_MOONCAKE, DECODE_NIXL)
    async with AsyncExitStack() as stack:
        encoder_tap = await http_tap(stack, "encode", encode.url)
        prefill_tap = await http_tap(stack, "prefill", prefill.url)
        decode_tap = await http_tap(stack, "decode", decode.url)
        control = await control_tap(stack, prefill.ec_address)
        stack.push_async_callback(ground.fleet.stop_others)
        proxy = await ground.fleet.serve(
            NAME,
            *("--encode-servers-urls", encoder_tap.url),
            *("--prefill-servers-urls", prefill_tap.url),
            *("--decode-servers-urls", decode_tap.url),
            *("--ec-consumer-zmq-addrs", control.address),
        )
        yield ground.deployment(
            NAME,
            proxy.url,
            encoders=(encoder_tap,),
            consumers=(prefill_tap, decode_tap),
            witnesses=(ControlMessages(control),),
        )


class TestPushedToPrefill(DeploymentSuite):
    """All three stages are vLLM instances; embeddings are pushed."""
