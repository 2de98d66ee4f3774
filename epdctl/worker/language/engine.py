"""The language engine process: model, KV, generation loop, and its ends of transfers.

Life of a request: `generate` arrives -> its embeddings are awaited (`intake`) -> it is queued and admitted
(`loop`) -> its KV is fetched, where another process has computed it (`kv_import`) -> it is computed step by
step -> `tokens` go out until every choice has finished -> its KV is freed, or kept for a decode
(`kv_server`).

Rules of this file: it only joins the parts and passes messages on. The model is loaded and run on one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from epdctl.errors import EpdError, ShuttingDown
from epdctl.worker.channel import Message, error_message, message
from epdctl.worker.engine import EngineContext, StartFailed, run_engine
from epdctl.worker.language.batch import Batch, Limits
from epdctl.worker.language.checkpoint import Checkpoint, UnsupportedCheckpoint, open_checkpoint
from epdctl.worker.language.exchange import Exchange
from epdctl.worker.language.intake import Intake, IntakeRules
from epdctl.worker.language.kv import KvPool
from epdctl.worker.language.kv_import import ImportEvents
from epdctl.worker.language.loop import GenerationLoop, LoopEvents
from epdctl.worker.language.messages import Drop, Generate, LanguageEngineSettings, ReadyFacts, Tokens
from epdctl.worker.language.model import LanguageModel, load_language_model
from epdctl.worker.language.runner import Runner
from epdctl.worker.language.warmup import run_once

_DRAIN_POLL_S = 0.02


class LanguageEngine:
    """See the module."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._settings = msgspec.convert(context.settings, LanguageEngineSettings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="language-model")
        self._stopping = False

    async def start(self) -> Mapping[str, Any]:
        """Load the model, run it once, open the receiving end; raises StartFailed."""
        settings = self._settings
        on_thread = asyncio.get_running_loop().run_in_executor
        checkpoint, model = await on_thread(self._thread, self._load)
        pool = self._new_pool(checkpoint, model)
        await on_thread(self._thread, run_once, model, pool, checkpoint.spec)
        events = ImportEvents(
            done=self._landed,
            failed=self._lost,
        )
        self._exchange = Exchange.open(settings, checkpoint.spec, pool, events, self._context.metrics)
        self._loop = self._new_loop(model, pool)
        self._intake = self._new_intake(checkpoint, model)
        self._running = self._context.begin(self._loop.run(), "generation loop")
        facts = ReadyFacts(
            ec_address=self._exchange.ec_address,
            kv_tokens=pool.tokens,
            parameters=model.parameter_names(),
        )
        return msgspec.structs.asdict(facts)

    def _new_intake(self, checkpoint: Checkpoint, model: LanguageModel) -> Intake:
        end, consumer = self._settings.ec, self._exchange.consumer
        return Intake(
            checkpoint.spec,
            model.device,
            consumer.receiver if consumer is not None else None,
            self._loop,
            rules=IntakeRules(push_wait_s=end.push_wait_s if end is not None else 0.0),
            failed=self._fail,
            give_up=self._exchange.give_up,
        )

    def _new_pool(self, checkpoint: Checkpoint, model: LanguageModel) -> KvPool:
        nbytes = self._settings.kv_bytes
        try:
            return KvPool(checkpoint.spec, nbytes, model.device)
        except (RuntimeError, OverflowError, TypeError) as error:  # what torch raises for too much
            raise StartFailed(
                f"--kv-bytes {nbytes}: {model.device} does not give that much memory"
            ) from error

    def _load(self) -> tuple[Checkpoint, LanguageModel]:
        torch.set_num_threads(self._settings.threads)
        try:
            checkpoint = open_checkpoint(self._settings.model, self._settings.dtype)
            return checkpoint, load_language_model(checkpoint, torch.device(self._settings.device))
        except UnsupportedCheckpoint as error:
            raise StartFailed(f"--model {error}") from error
        except (RuntimeError, AssertionError) as error:  # what torch raises for a device that is not there
            reason = str(error).splitlines()[0]
            raise StartFailed(f"--device {self._settings.device} cannot be used: {reason}") from error

    def _new_loop(self, model: LanguageModel, pool: KvPool) -> GenerationLoop:
        settings = self._settings
        limits = Limits(
            step_tokens=settings.step_tokens, sequences=settings.sequences, waiting=settings.waiting
        )
        return GenerationLoop(
            Batch(limits, pool, kv_tokens=pool.tokens),
            Runner(model),
            pool,
            self._thread,
            events=LoopEvents(tokens=self._send_tokens, failed=self._fail),
            metrics=self._context.metrics,
            exchange=self._exchange,
        )

    async def handle(self, received: Message) -> None:
        """Take one message of the front."""
        call_id = received.call_id
        if received.kind == "generate":
            if self._stopping:
                await self._fail(call_id, ShuttingDown("this worker is shutting down"))
            else:
                self._intake.begin(call_id, received.parse(Generate))
        elif received.kind == "drop":
            self._loop.cancel(call_id, received.parse(Drop).choice)
        elif received.kind == "cancel" and not self._intake.cancel(call_id):
            self._loop.cancel(call_id)
            self._exchange.release(call_id)

    def health(self) -> str | None:
        """Return what troubles the engine, or None."""
        return self._loop.trouble()

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let what was accepted end within `grace_s`, fail the rest, free everything."""
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + grace_s
        while len(self._intake) or len(self._loop) or self._exchange.held:
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        await self._intake.close()
        await self._loop.close()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._thread.shutdown(wait=True)
        await self._exchange.close()

    def _landed(self, call_id: str) -> None:
        self._loop.landed(call_id)

    def _lost(self, call_id: str, error: EpdError) -> None:
        self._loop.lost(call_id, error)

    async def _send_tokens(self, call_id: str, tokens: Tokens) -> None:
        await self._context.send(message("tokens", tokens, call_id=call_id))

    async def _fail(self, call_id: str, error: EpdError) -> None:
        await self._context.send(error_message(error, call_id=call_id))


def main() -> int:
    """Run the engine in this process."""
    return run_engine(LanguageEngine)


if __name__ == "__main__":
    raise SystemExit(main())
