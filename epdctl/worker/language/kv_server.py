"""The prefill's end of the KV hand-over: keeps finished prompts under a lease, writes them where decode says.

Rules of this file: order of steps only; leases are decided in `kv_holds`. Everything is on the event loop,
the digest on a thread beside the write. A region is freed when nobody reads it any more: after the write has
settled, not when it was reported as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog
import zmq.asyncio

from epdctl.ec.protocol import ControlAddress
from epdctl.errors import TransferFailed, UpstreamTimeout
from epdctl.metrics import WorkerMetrics
from epdctl.worker.duties import repeated
from epdctl.worker.language.kv import KvPool, KvRegion, prefix_digest
from epdctl.worker.language.kv_holds import Holds, InUse, NotHeld
from epdctl.worker.language.kv_layout import Extent, copy_pieces, shape_of
from epdctl.worker.language.kv_messages import (
    BadKvMessage,
    Fetch,
    Fetched,
    KvTicket,
    Refusal,
    RefusalCode,
    Release,
    Released,
    encode_reply,
    parse_request,
    prompt_digest,
)
from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.transfer.listener import ControlListener
from epdctl.worker.transfer.mooncake import TransferEngine

_TICK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class KvServerSettings:
    """Where the socket listens (port 0: any free one), how others reach it, how long KV waits for a fetch."""

    ip: str
    port: int
    host: str
    lease_s: float
    write_deadline_s: float = 30.0


class KvServer:
    """Leases of one prefill engine."""

    def __init__(
        self,
        settings: KvServerSettings,
        spec: ModelSpec,
        pool: KvPool,
        engine: TransferEngine,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._pool = pool
        self._engine = engine
        self._metrics = metrics
        self._holds: Holds[KvRegion] = Holds(settings.lease_s)
        self._context = zmq.asyncio.Context()
        address = ControlAddress(host=settings.ip, port=settings.port)
        self._listener = ControlListener(address, self._answer, self._context)
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")
        self._ticker: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    def __len__(self) -> int:
        """Prompts whose KV is held."""
        return len(self._holds)

    def start(self) -> None:
        """Bind the socket and start the lease timer; raises OSError when the port is taken."""
        self._listener.open()
        self._ticker = asyncio.create_task(repeated(self._tick, name="kv-leases"), name="kv-leases")

    async def close(self) -> None:
        """Stop answering; what is held stays as it is, the process ends."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._listener.close()
        self._digests.shutdown(wait=True)
        self._context.destroy(linger=0)

    def hold(self, kv_id: str, region: KvRegion, token_ids: Sequence[int]) -> KvTicket:
        """Take over a finished prompt's region; return the ticket for it."""
        self._pool.arena.pin(region.place)
        self._holds.hold(kv_id, region, len(token_ids), asyncio.get_running_loop().time())
        return KvTicket(
            remote_engine_id=self._engine.session,
            remote_request_id=kv_id,
            remote_host=self._settings.host,
            remote_port=self._listener.port,
            remote_num_tokens=len(token_ids),
            lease_s=self._settings.lease_s,
            kv_shape=shape_of(self._spec),
            prompt_digest=prompt_digest(token_ids),
        )

    def release(self, kv_id: str) -> bool:
        """End a lease that nobody will use; False when there is none to end."""
        region = self._holds.release(kv_id)
        if region is not None:
            self._count("released")
            self._free(region)
        return region is not None

    def _free(self, region: KvRegion) -> None:
        self._pool.arena.unpin(region.place)
        self._pool.free(region)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for region in self._holds.expire(asyncio.get_running_loop().time()):
                self._log.warning("kv_lease_expired")
                self._count("expired")
                self._free(region)

    async def _answer(self, body: bytes) -> bytes:
        try:
            request = parse_request(body)
        except BadKvMessage as error:
            return encode_reply(Refusal(error=str(error), code=RefusalCode.INVALID))
        if isinstance(request, Release):
            return encode_reply(Released(released=self.release(request.kv_id)))
        return encode_reply(await self._fetch(request))

    async def _fetch(self, request: Fetch) -> Fetched | Refusal:
        try:
            region, tokens = self._holds.take(request.kv_id, asyncio.get_running_loop().time())
        except NotHeld:
            return Refusal(error="no such KV is held here (any more)", code=RefusalCode.UNKNOWN)
        except InUse:
            return Refusal(error="this KV is being written already", code=RefusalCode.BUSY)
        source = Extent(address=region.address, capacity=region.capacity)
        target = Extent(address=request.address, capacity=request.capacity)
        try:
            pieces = copy_pieces(self._spec, source, target, tokens)
        except ValueError as error:
            self._end(request.kv_id)
            return Refusal(error=str(error), code=RefusalCode.INVALID)
        digest = asyncio.get_running_loop().run_in_executor(self._digests, prefix_digest, region, tokens)
        began = asyncio.get_running_loop().time()
        try:
            await self._engine.write(
                request.session,
                pieces,
                deadline_s=self._settings.write_deadline_s,
                on_settled=lambda: self._settle(request.kv_id, digest),
            )
        except (TransferFailed, UpstreamTimeout) as error:
            self._count("failed")
            return Refusal(error=error.message, code=RefusalCode.FAILED)
        nbytes = sum(piece.nbytes for piece in pieces)
        self._count("delivered", nbytes, asyncio.get_running_loop().time() - began)
        return Fetched(digest=await digest, nbytes=nbytes)

    def _settle(self, kv_id: str, digest: asyncio.Future[str]) -> None:
        """Free the region once neither the write nor the digest reads it."""
        if digest.done():
            self._end(kv_id)
        else:
            digest.add_done_callback(lambda _: self._end(kv_id))

    def _end(self, kv_id: str) -> None:
        self._free(self._holds.settle(kv_id))

    def _count(self, outcome: str, nbytes: int = 0, seconds: float | None = None) -> None:
        self._metrics.kv_transfers.labels("producer", outcome).inc()
        self._metrics.kv_transfer_bytes.labels("producer").inc(nbytes)
        if seconds is not None:
            self._metrics.kv_transfer_seconds.labels("producer").observe(seconds)
