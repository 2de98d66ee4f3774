"""The deployment of vLLM's encoder, prefill and decode that several modules use, with any KV connector."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.interop.deployment import Deployment
from tests.interop.engines import ENCODE_EXAMPLE, EngineSpec
from tests.interop.evidence import StoredFiles
from tests.interop.ground import Ground
from tests.interop.wiring import ADMIN_KEY, http_tap, register


@asynccontextmanager
async def example_triple(
    ground: Ground, name: str, *flags: str, kv: tuple[EngineSpec, EngineSpec]
) -> AsyncIterator[Deployment]:
    """vLLM encoder with ECExampleConnector, and prefill and decode of `kv`, registered with `epdctl serve`.

    A prefill instance with the KV MooncakeConnector is registered with its bootstrap server.
    """
    encode, prefill, decode = await ground.fleet.use(ENCODE_EXAMPLE, *kv)
    has_bootstrap = prefill.spec.kv == "MooncakeConnector"
    bootstrap = {"kv_bootstrap_addr": prefill.bootstrap_address} if has_bootstrap else {}
    async with AsyncExitStack() as stack:
        encoder_tap = await http_tap(stack, "encode", encode.url)
        prefill_tap = await http_tap(stack, "prefill", prefill.url)
        decode_tap = await http_tap(stack, "decode", decode.url)
        stack.push_async_callback(ground.fleet.stop_others)
        proxy = await ground.fleet.serve(name, "--dynamic-registration", *flags, key=ADMIN_KEY)
        await register(proxy.url, "encode", encoder_tap.url)
        await register(proxy.url, "prefill", prefill_tap.url, **bootstrap)
        await register(proxy.url, "decode", decode_tap.url)
        yield ground.deployment(
            name,
            proxy.url,
            encoders=(encoder_tap,),
            consumers=(prefill_tap, decode_tap),
            witnesses=(StoredFiles(encode.place.shared_storage, encoder_tap),),
        )
