"""d: vLLM encoder, prefill and decode; KV travels by vLLM's MooncakeConnector.

The reference proxy cannot hand KV over in this style: both legs run at once, under an id of the proxy's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.interop.answers import Answer
from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.engines import DECODE_MOONCAKE_KV, ENCODE_EXAMPLE, PREFILL_MOONCAKE_KV
from tests.interop.evidence import StoredFiles
from tests.interop.fleet import Fleet
from tests.interop.scenarios import MediaUrl, scenarios
from tests.interop.suite import DeploymentSuite
from tests.interop.wiring import ADMIN_KEY, http_tap, register

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
async def deployment(
    fleet: Fleet, plain: dict[str, dict[str, Answer]], media_url: MediaUrl
) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    encode, prefill, decode = await fleet.use(ENCODE_EXAMPLE, PREFILL_MOONCAKE_KV, DECODE_MOONCAKE_KV)
    async with AsyncExitStack() as stack:
        encoder_tap = await http_tap(stack, "encode", encode.url)
        prefill_tap = await http_tap(stack, "prefill", prefill.url)
        decode_tap = await http_tap(stack, "decode", decode.url)
        stack.push_async_callback(fleet.stop_others)
        proxy = await fleet.serve(NAME, "--dynamic-registration", "--kv-connector", "mooncake", key=ADMIN_KEY)
        await register(proxy.url, "encode", encoder_tap.url)
        await register(proxy.url, "prefill", prefill_tap.url, kv_bootstrap_addr=prefill.bootstrap_address)
        await register(proxy.url, "decode", decode_tap.url)
        yield Deployment(
            name=NAME,
            url=proxy.url,
            encoders=(encoder_tap,),
            consumers=(prefill_tap, decode_tap),
            witnesses=(StoredFiles(encode.place.shared_storage, encoder_tap),),
            scenarios=scenarios(NAME, media_url),
            plain=plain[NAME],
        )


class TestKvOverMooncake(DeploymentSuite):
    """All three stages are vLLM instances; decode fetches KV from prefill over Mooncake."""
