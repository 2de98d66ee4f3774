"""Claims about the main job: pictures through proxy, encode worker and prefill_decode worker, all real."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch

from epdctl.local.deployment import Deployment, deploy, free_ports
from epdctl.local.plan import WorkerOptions
from epdctl.local.shape import parse_shape
from tests.e2e.reference import Answer, Reference
from tests.e2e.tiny_pictures import (
    COLOUR_QUESTION,
    QWEN2_5_VL,
    QWEN3_VL,
    Picture,
    ask,
    expected_answer,
    held_out_pictures,
)
from tests.e2e.video_patches import prepared_video
from tests.stubs.videos import clip, video_part

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.worker,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

MODEL = "tiny-vlm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A deployment with the checkpoint it serves, run whole as reference."""

    deployment: Deployment
    reference: Reference
    session: aiohttp.ClientSession
    folder: Path

    async def ask(self, messages: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Send one greedy chat request; return the parsed answer, which must be a 200."""
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 32, **fields}
        async with self.session.post(f"{self.deployment.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def metrics(self, name: str) -> str:
        """Return the metrics text of the worker called `name`."""
        child = next(c for c in self.deployment.children if c.plan.name == name)
        async with self.session.get(f"{child.plan.url}/metrics") as answer:
            return await answer.text()


def total(text: str, name: str, **labels: str) -> float:
    """Return the sum of metric `name` over the series that carry `labels`."""
    series = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(value) for found, value in series if all(pair in found for pair in wanted))


async def _run(shape: str, folder: Any, log_dir: Any) -> AsyncIterator[Running]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MC_FORCE_TCP": "1", "ADMIN_API_KEY": "k"}
    async with (
        deploy(
            parse_shape(shape),
            WorkerOptions(model=str(folder), served_model_name=MODEL, device="cpu"),
            proxy_port=free_ports(1)[0],
            log_dir=log_dir,
            environment=environment,
            start_timeout_s=120,
            stop_grace_s=15,
            say=lambda _: None,
        ) as deployment,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        yield Running(deployment=deployment, reference=Reference(folder), session=session, folder=folder)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[QWEN2_5_VL, QWEN3_VL], ids=["qwen2_5_vl", "qwen3_vl"]
)
async def two_encoders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    """Two encode workers and one prefill_decode worker behind the proxy."""
    async for running in _run("2e1pd", request.param, tmp_path_factory.mktemp("logs")):
        yield running


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def _same(answer: dict[str, Any], whole: Answer) -> bool:
    """Compare text, generated tokens and prompt tokens, id for id."""
    (choice,) = answer["choices"]
    return (
        choice["message"]["content"] == whole.text
        and tuple(choice["token_ids"]) == whole.token_ids
        and tuple(answer["prompt_token_ids"]) == whole.prompt_token_ids
    )


def _sets_of_pictures() -> list[tuple[Picture, ...]]:
    """Return 60 held-out requests: 40 with one picture, 10 with two, and 10 with three."""
    pictures = iter(held_out_pictures(40 + 20 + 30))
    sizes = [1] * 40 + [2] * 10 + [3] * 10
    return [tuple(next(pictures) for _ in range(size)) for size in sizes]


async def test_golden_answers_are_right_and_those_of_the_whole_model(two_encoders: Running) -> None:
    """Of 60 held-out requests at least 57 are answered rightly, and all 60 as the checkpoint run whole."""
    sets = _sets_of_pictures()

    answers = await asyncio.gather(
        *(two_encoders.ask(ask(pictures), return_token_ids=True) for pictures in sets)
    )

    right = sum(_text(answer) == expected_answer(s) for answer, s in zip(answers, sets, strict=True))
    wholes = [two_encoders.reference.answer(ask(pictures), max_tokens=32) for pictures in sets]
    different = [
        (_text(answer), whole.text)
        for answer, whole in zip(answers, wholes, strict=True)
        if not _same(answer, whole)
    ]
    assert different == []
    assert right >= 57


async def test_both_ends_count_the_same_transfers_and_bytes(two_encoders: Running) -> None:
    """Encoders and consumer agree on how many embeddings, and how many bytes, Mooncake carried."""
    before = [await two_encoders.metrics(name) for name in ("encode-0", "encode-1", "prefill-decode-0")]

    await asyncio.gather(*(two_encoders.ask(ask([p])) for p in held_out_pictures(6, first=500)))

    after = [await two_encoders.metrics(name) for name in ("encode-0", "encode-1", "prefill-decode-0")]
    grown = {
        name: [total(a, name) - total(b, name) for a, b in zip(after, before, strict=True)]
        for name in ("epdctl_ec_transfers_total", "epdctl_ec_bytes_total")
    }
    for first, second, consumer in grown.values():
        assert first > 0 and second > 0
        assert first + second == consumer
    assert sum(grown["epdctl_ec_transfers_total"][:2]) == 6


async def test_a_repeated_picture_is_encoded_once_on_its_encoder(two_encoders: Running) -> None:
    """The same picture sent twice to the same encoder costs one tower forward."""
    picture = held_out_pictures(1, first=700)[0]

    for _ in range(4):
        await two_encoders.ask(ask([picture]))

    texts = [await two_encoders.metrics(name) for name in ("encode-0", "encode-1")]
    hits = sum(total(t, "epdctl_cache_requests_total", tier="l1", result="hit") for t in texts)
    assert hits >= 2


async def test_the_prefill_decode_process_holds_no_vision_parameters(two_encoders: Running) -> None:
    """A picture that comes straight to the prefill_decode worker is refused: it has no tower to see with."""
    child = next(c for c in two_encoders.deployment.children if c.plan.name == "prefill-decode-0")
    body = {"model": MODEL, "messages": ask(held_out_pictures(1, first=800)), "max_tokens": 4}

    async with two_encoders.session.post(f"{child.plan.url}/v1/chat/completions", json=body) as answer:
        status, error = answer.status, (await answer.json())["error"]

    assert status == 400
    assert error["code"] == "unsupported_media"


async def test_text_and_pictures_answer_interleaved(two_encoders: Running) -> None:
    """Text-only and picture requests under way together each get their own whole-model answer."""
    texts = [[{"role": "user", "content": f"What color is number {n}?"}] for n in range(4)]
    pictures = [ask([p]) for p in held_out_pictures(4, first=900)]

    answers = await asyncio.gather(
        *(two_encoders.ask(m) for pair in zip(texts, pictures, strict=True) for m in pair)
    )

    wholes = [
        two_encoders.reference.answer(m, max_tokens=32)
        for pair in zip(texts, pictures, strict=True)
        for m in pair
    ]
    assert [_text(a) for a in answers] == [w.text for w in wholes]


async def test_a_video_is_answered_as_by_the_whole_model(two_encoders: Running) -> None:
    """A video goes through encoder and language model like a picture, to the whole model's tokens; a model
    whose videos this language worker does not take gets a 400 that says so."""
    data = clip(16, width=140, height=112)
    parts = [video_part(data), {"type": "text", "text": COLOUR_QUESTION}]
    messages = [{"role": "user", "content": parts}]
    if two_encoders.folder == QWEN3_VL:
        body = {"model": MODEL, "messages": messages, "max_tokens": 4}
        url = f"{two_encoders.deployment.url}/v1/chat/completions"
        async with two_encoders.session.post(url, json=body) as answer:
            status, error = answer.status, (await answer.json())["error"]
        assert (status, error["code"]) == (400, "unsupported_media")
        return

    found = await two_encoders.ask(messages, return_token_ids=True)

    prepared = prepared_video(two_encoders.folder, data)
    patches, grid = torch.from_numpy(prepared.pixels), prepared.layout.geometry
    assert grid[0] == 2
    assert _same(found, two_encoders.reference.answer_video(COLOUR_QUESTION, patches, grid))


async def test_in_flight_counts_return_to_zero(two_encoders: Running) -> None:
    """After all that, nothing is in flight anywhere, and no arena byte is pinned."""
    async with two_encoders.session.get(f"{two_encoders.deployment.url}/instances?view=detail") as answer:
        instances = (await answer.json())["instances"]
    texts = [await two_encoders.metrics(name) for name in ("encode-0", "encode-1", "prefill-decode-0")]

    assert [i["in_flight"] for i in instances] == [0, 0, 0]
    assert [total(text, "epdctl_in_flight") for text in texts] == [0, 0, 0]
    assert [total(text, "epdctl_arena_bytes", state="pinned") for text in texts] == [0, 0, 0]
