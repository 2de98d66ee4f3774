"""The deployments of one bundled worker and one vLLM instance, over ECMooncakeConnector's wire protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.interop.deployment import Deployment
from tests.interop.engines import ENCODE_MOONCAKE, HOST, PREFILL_DECODE_MOONCAKE
from tests.interop.evidence import ControlMessages, TransferMetrics
from tests.interop.ground import Ground
from tests.interop.wiring import ADMIN_KEY, control_tap, http_tap, register
from tests.stubs.ports import free_port


@asynccontextmanager
async def our_encoder_pair(ground: Ground, name: str) -> AsyncIterator[Deployment]:
    """Our encode worker and vLLM's prefill_decode, registered with `epdctl serve`."""
    (consumer,) = await ground.fleet.use(PREFILL_DECODE_MOONCAKE, may_stay=(ENCODE_MOONCAKE,))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ground.fleet.stop_others)
        encode = await ground.fleet.worker("encode", "--allowed-media-domains", HOST)
        ours = TransferMetrics(url=encode.url, side="producer")
        yield await _registered(ground, stack, name, encode.url, consumer.url, consumer.ec_address, ours)


@asynccontextmanager
async def our_prefill_decode_pair(ground: Ground, name: str) -> AsyncIterator[Deployment]:
    """vLLM's encoder and our prefill_decode worker, registered with `epdctl serve`."""
    (encode,) = await ground.fleet.use(ENCODE_MOONCAKE)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ground.fleet.stop_others)
        ec_port = free_port()
        consumer = await ground.fleet.worker("prefill-decode", "--ec-ip", HOST, "--ec-port", str(ec_port))
        ours = TransferMetrics(url=consumer.url, side="consumer")
        ec_address = f"tcp://{HOST}:{ec_port}"
        yield await _registered(ground, stack, name, encode.url, consumer.url, ec_address, ours)


async def _registered(
    ground: Ground,
    stack: AsyncExitStack,
    name: str,
    encode: str,
    consumer: str,
    ec_address: str,
    ours: TransferMetrics,
) -> Deployment:
    """Tap an encoder, a consumer and its control address, and register the taps with a new proxy."""
    encoder_tap = await http_tap(stack, "encode", encode)
    consumer_tap = await http_tap(stack, "prefill_decode", consumer)
    control = await control_tap(stack, ec_address)
    proxy = await ground.fleet.serve(name, "--dynamic-registration", key=ADMIN_KEY)
    await register(proxy.url, "encode", encoder_tap.url)
    await register(proxy.url, "prefill_decode", consumer_tap.url, control.address)
    return ground.deployment(
        name,
        proxy.url,
        encoders=(encoder_tap,),
        consumers=(consumer_tap,),
        witnesses=(ControlMessages(control), ours),
    )
