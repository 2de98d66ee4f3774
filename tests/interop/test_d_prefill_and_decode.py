"""d: vLLM encoder, prefill and decode behind `epdctl serve`; KV travels from prefill to decode by NIXL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.interop.answers import Answer, ask
from tests.interop.compatibility import Row
from tests.interop.deployment import Deployment
from tests.interop.engines import DECODE_NIXL, ENCODE_EXAMPLE, PREFILL_NIXL
from tests.interop.evidence import StoredFiles
from tests.interop.fleet import Fleet
from tests.interop.scenarios import MediaUrl, scenarios
from tests.interop.suite import DeploymentSuite
from tests.interop.wiring import ADMIN_KEY, http_tap, register

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
async def deployment(
    fleet: Fleet, plain: dict[str, dict[str, Answer]], media_url: MediaUrl
) -> AsyncIterator[Deployment]:
    """The deployment, registered over HTTP."""
    encode, prefill, decode = await fleet.use(ENCODE_EXAMPLE, PREFILL_NIXL, DECODE_NIXL)
    async with AsyncExitStack() as stack:
        encoder_tap = await http_tap(stack, "encode", encode.url)
        prefill_tap = await http_tap(stack, "prefill", prefill.url)
        decode_tap = await http_tap(stack, "decode", decode.url)
        stack.push_async_callback(fleet.stop_others)
        proxy = await fleet.serve(NAME, "--dynamic-registration", key=ADMIN_KEY)
        await register(proxy.url, "encode", encoder_tap.url)
        await register(proxy.url, "prefill", prefill_tap.url)
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
