"""Claims about prefill and decode workers when one of them is killed, stopped or told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.language_worker import Worker, engine_pids, language_worker
from tests.e2e.tiny_pictures import COLOUR_QUESTION, LONG_QUESTION, QWEN2_5_VL, text

pytestmark = [pytest.mark.fault, pytest.mark.worker, pytest.mark.timeout(180)]

ASK_PREFILL = {"do_remote_decode": True}


@asynccontextmanager
async def two_workers(tmp_path: Path) -> AsyncIterator[tuple[Worker, Worker]]:
    """Run a prefill and a decode worker."""
    async with (
        language_worker(QWEN2_5_VL, tmp_path, "--kv-lease", "5", role="prefill") as prefill,
        language_worker(QWEN2_5_VL, tmp_path, "--kv-wait-timeout", "2", role="decode") as decode,
    ):
        yield prefill, decode


async def ticket(prefill: Worker, question: str) -> dict[str, Any]:
    """Prefill a text; return the parameters for decode."""
    answer = await prefill.ask(text(question), max_tokens=1, kv_transfer_params=ASK_PREFILL)
    params: dict[str, Any] = answer.body["kv_transfer_params"]
    return params


async def through(prefill: Worker, decode: Worker, **fields: Any) -> str:
    """Send a text through both workers; return its answer."""
    params = await ticket(prefill, LONG_QUESTION)
    return (await decode.ask(text(LONG_QUESTION), kv_transfer_params=params, **fields)).text


async def test_a_prefill_that_died_is_a_clear_error_and_leaks_nothing(tmp_path: Path) -> None:
    """Its engine gone, decode answers 500 within 2 s while a running answer stays byte for byte the same."""
    async with two_workers(tmp_path) as (prefill, decode):
        undisturbed = await decode.ask(text(LONG_QUESTION), max_tokens=600, ignore_eos=True)
        running = asyncio.create_task(decode.ask(text(LONG_QUESTION), max_tokens=600, ignore_eos=True))
        params = await ticket(prefill, COLOUR_QUESTION)
        os.kill(engine_pids(prefill)[0], signal.SIGKILL)
        began = time.monotonic()
        answer = await decode.ask(text(COLOUR_QUESTION), kv_transfer_params=params)
        elapsed_s = time.monotonic() - began
        text_of_running = (await running).text
        await decode.until_idle()

    assert (answer.status, answer.error["code"], elapsed_s < 2) == (500, "kv_undelivered", True)
    assert text_of_running == undisturbed.text


async def test_late_bytes_of_a_stopped_prefill_reach_nobody(tmp_path: Path) -> None:
    """A prefill that hangs in a hand-over and wakes up later writes into a quarantined region only."""
    async with two_workers(tmp_path) as (prefill, decode):
        expected = await through(prefill, decode)
        params = await ticket(prefill, LONG_QUESTION)
        (engine,) = engine_pids(prefill)
        os.kill(engine, signal.SIGSTOP)
        late = await decode.ask(text(LONG_QUESTION), kv_transfer_params=params)
        quarantined = await decode.metric("epdctl_kv_bytes", state="quarantined")
        others = asyncio.gather(*(decode.ask(text(LONG_QUESTION)) for _ in range(8)))
        os.kill(engine, signal.SIGCONT)
        answers = [answer.text for answer in await others]
        again = await through(prefill, decode)
        await prefill.until_idle(15)
        await decode.until_idle()

    assert (late.status, late.error["code"], quarantined > 0) == (500, "kv_undelivered", True)
    assert [*answers, again] == [expected] * 9


async def test_a_decode_that_died_leaves_no_lease(tmp_path: Path) -> None:
    """Its engine killed in the middle of an answer, decode says so, comes back, and prefill holds nothing."""
    async with two_workers(tmp_path) as (prefill, decode):
        expected = await through(prefill, decode)
        params = await ticket(prefill, LONG_QUESTION)
        running = asyncio.create_task(
            decode.ask(text(LONG_QUESTION), kv_transfer_params=params, max_tokens=3000, ignore_eos=True)
        )
        await decode.process.wait_until(lambda: _generates(decode), "it generates")
        unfetched = await ticket(prefill, LONG_QUESTION)
        os.kill(engine_pids(decode)[0], signal.SIGKILL)
        died = await running
        refused = await decode.ask(text(LONG_QUESTION), kv_transfer_params=unfetched)
        await prefill.until_idle(10)

        async def ready() -> bool:
            return (await decode.health())[0] == 200

        await decode.process.wait_until(ready, "healthy again", 60)
        again = await through(prefill, decode)

    assert (died.status, died.error["code"]) == (503, "engine_unavailable")
    assert (refused.status, refused.error["code"]) == (503, "engine_unavailable")
    assert again == expected


async def _generates(worker: Worker) -> bool:
    return await worker.metric("epdctl_generated_tokens_total") > 50


async def test_a_prefill_that_is_told_to_end_hands_over_first(tmp_path: Path) -> None:
    """After SIGTERM KV that is held can still be fetched; then the worker ends with 0."""
    async with two_workers(tmp_path) as (prefill, decode):
        expected = await through(prefill, decode)
        params = await ticket(prefill, LONG_QUESTION)
        prefill.process.send_signal(signal.SIGTERM)
        answer = await decode.ask(text(LONG_QUESTION), kv_transfer_params=params)
        code = await prefill.process.wait_exit(20)

    assert (answer.status, answer.text, code) == (200, expected, 0)
