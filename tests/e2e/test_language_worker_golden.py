"""The golden comparison: in any shape of deployment the tokens are those of the checkpoint run whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epdctl.local.deployment import deploy, free_ports
from epdctl.local.plan import WorkerOptions
from epdctl.local.shape import parse_shape
from tests.e2e.reference import Reference
from tests.e2e.tiny_pictures import LONG_QUESTION, QWEN2_5_VL, QWEN3_VL, Message, ask, held_out_pictures, text

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.timeout(600)]

MODEL = "tiny-vlm"
MAX_TOKENS = 48


def conversations(count: int) -> list[list[Message]]:
    """Return `count` conversations: one, two and three pictures, text only, several turns."""
    made: list[list[Message]] = []
    for i in range(count):
        pictures = list(held_out_pictures(3, first=1100 + 3 * i))
        said = {"role": "assistant", "content": "red"}
        kinds = [
            ask(pictures[:1]),
            ask(pictures[:2]),
            text(LONG_QUESTION),
            [*ask(pictures[:1]), said, *ask(pictures[1:2])],
            ask(pictures),
        ]
        made.append(kinds[i % 5])
    return made


async def token_ids(url: str, requests: Sequence[list[Message]]) -> list[tuple[int, ...]]:
    """Send the requests, sixteen at a time; return each one's tokens."""
    gate = asyncio.Semaphore(16)
    timeout = aiohttp.ClientTimeout(total=120)

    async def one(session: aiohttp.ClientSession, messages: list[Message]) -> tuple[int, ...]:
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        sent: dict[str, Any] = body | {"return_token_ids": True}
        async with gate, session.post(f"{url}/v1/chat/completions", json=sent) as answer:
            assert answer.status == 200, await answer.text()
            return tuple((await answer.json())["choices"][0]["token_ids"])

    async with aiohttp.ClientSession(timeout=timeout) as session:
        return list(await asyncio.gather(*(one(session, messages) for messages in requests)))


async def compare(shape: str, folder: Path, log_dir: Path, count: int) -> None:
    """Run a deployment of `shape` and compare its answers to `count` requests with the whole checkpoint's."""
    requests = conversations(count)
    reference = Reference(folder)
    expected = [reference.answer(messages, MAX_TOKENS).token_ids for messages in requests]
    async with deploy(
        parse_shape(shape),
        WorkerOptions(model=str(folder), served_model_name=MODEL, device="cpu"),
        proxy_port=free_ports(1)[0],
        log_dir=log_dir,
        environment={**os.environ, "OMP_NUM_THREADS": "1", "ADMIN_API_KEY": "k"},
        start_timeout_s=240,
        stop_grace_s=15,
        say=lambda _: None,
    ) as deployment:
        answers = await token_ids(deployment.url, requests)

    assert answers == expected


@pytest.mark.parametrize("folder", [QWEN2_5_VL, QWEN3_VL], ids=["qwen2_5_vl", "qwen3_vl"])
async def test_golden_one_encoder_prefill_and_decode(folder: Path, tmp_path: Path) -> None:
    """20 mixed requests through 1E+1P+1D give the whole network's tokens, id for id."""
    await compare("1e1p1d", folder, tmp_path, 20)


@pytest.mark.full
@pytest.mark.parametrize("folder", [QWEN2_5_VL, QWEN3_VL], ids=["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("shape", ["1e1pd", "1e1p1d", "2e2p2d"])
async def test_golden_a_hundred_requests(shape: str, folder: Path, tmp_path: Path) -> None:
    """100 mixed requests through each shape give the whole network's tokens, id for id."""
    await compare(shape, folder, tmp_path, 100)
