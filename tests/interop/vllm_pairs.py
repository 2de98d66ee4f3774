"""The two deployments of vLLM instances only that several modules use: one for each EC connector."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from tests.interop.control_tap import ControlTap
from tests.interop.deployment import Deployment
from tests.interop.engines import (
    ENCODE_EXAMPLE,
    ENCODE_MOONCAKE,
    PREFILL_DECODE_EXAMPLE,
    PREFILL_DECODE_MOONCAKE,
)
from tests.interop.evidence import ControlMessages, StoredFiles
from tests.interop.ground import Ground
from tests.interop.tap import HttpTap
from tests.interop.wiring import ADMIN_KEY, control_tap, http_tap, register


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A deployment, and the taps in which a test may put a fault."""

    deployment: Deployment
    consumer: HttpTap
    control: ControlTap | None = None


@asynccontextmanager
async def mooncake_pair(ground: Ground, name: str) -> AsyncIterator[Pair]:
    """vLLM encoder and prefill_decode with ECMooncakeConnector behind `epdctl serve` with static URLs."""
    encode, consumer = await ground.fleet.use(ENCODE_MOONCAKE, PREFILL_DECODE_MOONCAKE)
    async with AsyncExitStack() as stack:
        encoder_tap = await http_tap(stack, "encode", encode.url)
        consumer_tap = await http_tap(stack, "prefill_decode", consumer.url)
        control = await control_tap(stack, consumer.ec_address)
        stack.push_async_callback(ground.fleet.stop_others)
        proxy = await ground.fleet.serve(
            name,
            *("--encode-servers-urls", encoder_tap.url),
            *("--decode-servers-urls", consumer_tap.url),
            *("--ec-consumer-zmq-addrs", control.address),
        )
        deployment = ground.deployment(
            name,
            proxy.url,
            encoders=(encoder_tap,),
            consumers=(consumer_tap,),
            witnesses=(ControlMessages(control),),
        )
        yield Pair(deployment=deployment, consumer=consumer_tap, control=control)


@asynccontextmanager
async def example_pair(ground: Ground, name: str, *flags: str) -> AsyncIterator[Pair]:
    """vLLM encoder and prefill_decode with ECExampleConnector, registered with `epdctl serve` and `flags`."""
    encode, consumer = await ground.fleet.use(ENCODE_EXAMPLE, PREFILL_DECODE_EXAMPLE)
    async with AsyncExitStack() as stack:
        encoder_tap = await http_tap(stack, "encode", encode.url)
        consumer_tap = await http_tap(stack, "prefill_decode", consumer.url)
        stack.push_async_callback(ground.fleet.stop_others)
        proxy = await ground.fleet.serve(name, "--dynamic-registration", *flags, key=ADMIN_KEY)
        await register(proxy.url, "encode", encoder_tap.url)
        await register(proxy.url, "prefill_decode", consumer_tap.url)
        deployment = ground.deployment(
            name,
            proxy.url,
            encoders=(encoder_tap,),
            consumers=(consumer_tap,),
            witnesses=(StoredFiles(encode.place.shared_storage, encoder_tap),),
        )
        yield Pair(deployment=deployment, consumer=consumer_tap)
