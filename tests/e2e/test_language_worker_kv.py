"""Claims about prefill and decode workers: a prompt's KV goes from one to the other over Mooncake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq.asyncio

from epdctl.ec.protocol import ControlAddress
from epdctl.worker.language.checkpoint import open_checkpoint
from epdctl.worker.language.kv_client import KvClient
from epdctl.worker.language.kv_layout import Extent, copy_pieces
from epdctl.worker.language.kv_messages import (
    Fetch,
    Fetched,
    KvTicket,
    Released,
    encode_reply,
    parse_request,
    parse_ticket,
)
from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.transfer.digest import digest_of
from epdctl.worker.transfer.listener import ControlListener
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine
from tests.e2e.language_worker import HOST, MODEL, Answer, Producer, Worker, language_worker, rewritten
from tests.e2e.reference import Reference
from tests.e2e.tiny_pictures import (
    COLOUR_QUESTION,
    LONG_QUESTION,
    QWEN2_5_VL,
    QWEN3_VL,
    Message,
    Picture,
    ask,
    expected_answer,
    held_out_pictures,
    mixed,
    text,
)
from tests.e2e.tower import Tower

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.worker,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

LEASE_S = 4.0
ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prefill and a decode worker, a producer of embeddings, and the same checkpoint run whole."""

    prefill: Worker
    decode: Worker
    producer: Producer
    reference: Reference
    spec: ModelSpec

    async def start(self, messages: list[Message], pictures: list[Picture]) -> tuple[dict[str, Any], Answer]:
        """Push the pictures and prefill; return the request for decode and prefill's answer."""
        request = await self.producer.prepare(self.prefill.consumer_zmq, messages, pictures)
        answer = await self.prefill.ask(**request, max_tokens=1, kv_transfer_params=ASK_PREFILL)
        assert answer.status == 200, answer.body
        return request | {"kv_transfer_params": answer.body["kv_transfer_params"]}, answer

    async def ask(self, messages: list[Message], pictures: list[Picture], **fields: Any) -> Answer:
        """Send a request through both workers, as the proxy does."""
        request, _ = await self.start(messages, pictures)
        return await self.decode.ask(**(request | fields))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[QWEN2_5_VL, QWEN3_VL], ids=["qwen2_5_vl", "qwen3_vl"]
)
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    """Run a pair of workers of each checkpoint."""
    folder: Path = request.param
    logs = tmp_path_factory.mktemp("logs")
    producer = Producer(Tower(folder))
    async with (
        language_worker(folder, logs, "--kv-lease", str(LEASE_S), role="prefill") as prefill,
        language_worker(folder, logs, "--kv-wait-timeout", "3", role="decode") as decode,
    ):
        yield Pair(
            prefill=prefill,
            decode=decode,
            producer=producer,
            reference=Reference(folder),
            spec=open_checkpoint(str(folder), "auto").spec,
        )
    await producer.close()


class TestIdentity:
    """The split changes nothing."""

    async def test_golden_tokens_equal_the_whole_networks(self, pair: Pair) -> None:
        """20 mixed requests at once through prefill and decode give transformers' own tokens."""
        requests = mixed(20, first=900)
        answers = await asyncio.gather(
            *(pair.ask(messages, pictures, return_token_ids=True) for messages, pictures in requests)
        )
        expected = [pair.reference.answer(messages, 32).token_ids for messages, _ in requests]

        assert [tuple(a.body["choices"][0]["token_ids"]) for a in answers] == expected
        await pair.prefill.until_idle()
        await pair.decode.until_idle()

    async def test_sampling_goes_on_as_if_undivided(self, pair: Pair) -> None:
        """Seeded choices with log probabilities are those of one worker that does both."""
        options = {"n": 3, "temperature": 1.3, "seed": 5, "max_tokens": 20, "ignore_eos": True}
        report = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        split = await pair.ask(text(LONG_QUESTION), [], **options, **report)
        whole = await pair.prefill.ask(text(LONG_QUESTION), **options, **report)

        assert [c["token_ids"] for c in split.body["choices"]] == [
            c["token_ids"] for c in whole.body["choices"]
        ]
        assert split.body["usage"] == whole.body["usage"]
        first, again = (a.body["choices"][0]["logprobs"]["content"][0]["logprob"] for a in (split, whole))
        assert first == pytest.approx(again, abs=1e-4)

    async def test_a_stream_of_decode_starts_with_the_first_token(self, pair: Pair) -> None:
        """Decode's stream says the whole answer, the token that prefill chose included."""
        pictures = list(held_out_pictures(1, first=950))
        stream = await pair.ask(ask(pictures), pictures, stream=True)

        assert (stream.text, stream.events[-1]) == (expected_answer(pictures), None)

    async def test_prefill_answers_with_one_token_and_a_ticket(self, pair: Pair) -> None:
        """Prefill's answer is a chat completion of one token whose parameters say where the KV waits."""
        request, answer = await pair.start(text(LONG_QUESTION), [])
        ticket = parse_ticket(request["kv_transfer_params"])
        whole = await pair.decode.ask(**request)

        assert answer.body["usage"]["completion_tokens"] == 1
        assert whole.text.startswith(answer.text)
        assert (ticket.remote_num_tokens, ticket.lease_s) == (answer.body["usage"]["prompt_tokens"], LEASE_S)

    async def test_completions_are_handed_over_too(self, pair: Pair) -> None:
        """/v1/completions goes the same way, for one prompt at a time."""
        body = {"model": MODEL, "prompt": "red then", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        whole = await pair.prefill.post("/v1/completions", body)
        first = await pair.prefill.post("/v1/completions", body | {"kv_transfer_params": ASK_PREFILL})
        params = first.body["kv_transfer_params"]
        split = await pair.decode.post("/v1/completions", body | {"kv_transfer_params": params})
        two = await pair.prefill.post(
            "/v1/completions", body | {"prompt": ["a", "b"], "kv_transfer_params": ASK_PREFILL}
        )

        assert split.body["choices"][0]["text"] == whole.body["choices"][0]["text"]
        assert (two.status, two.error["param"]) == (400, "prompt")

    async def test_both_ends_count_the_same_bytes(self, pair: Pair) -> None:
        """Transfers and bytes in the metrics of both ends agree."""
        await pair.ask(text(LONG_QUESTION), [])
        sides = ((pair.prefill, "producer"), (pair.decode, "consumer"))
        counted = [
            (
                await worker.metric("epdctl_kv_transfers_total", side=side, outcome="delivered"),
                await worker.metric("epdctl_kv_transfer_bytes_total", side=side),
            )
            for worker, side in sides
        ]

        assert counted[0] == counted[1]
        assert counted[0][1] > 0


class TestLeases:
    """KV that nobody fetches."""

    async def test_a_decode_that_never_comes_frees_the_memory(self, pair: Pair) -> None:
        """The KV is held, then gone when its lease is over; a decode that comes later gets a clear 500."""
        request, _ = await pair.start(text(LONG_QUESTION), [])
        held = await pair.prefill.metric("epdctl_kv_bytes", state="pinned")
        await pair.prefill.until_idle(LEASE_S + 3)
        late = await pair.decode.ask(**request)

        assert held > 0
        assert (late.status, late.error["code"]) == (500, "kv_undelivered")
        await pair.decode.until_idle()

    async def test_kv_is_handed_over_once(self, pair: Pair) -> None:
        """A second decode with the same ticket is told that it is gone."""
        request, _ = await pair.start(text(LONG_QUESTION), [])
        first = await pair.decode.ask(**request)
        second = await pair.decode.ask(**request, stream=True)

        assert (first.status, second.status, second.error["code"]) == (200, 500, "kv_undelivered")

    async def test_a_decode_without_a_ticket_computes_texts_only(self, pair: Pair) -> None:
        """A text is computed by decode itself; a prompt with pictures is refused, the way out is named."""
        pictures = list(held_out_pictures(1, first=951))
        items = [{"mm_hash": "h", "transfer_id": "t"}]
        request = rewritten(ask(pictures), pair.producer.encode(pictures), items)
        words = await pair.decode.ask(text(LONG_QUESTION))
        refused = await pair.decode.ask(**request)

        assert words.status == 200
        assert (refused.status, refused.error["param"]) == (400, "kv_transfer_params")


Change = Callable[[memoryview], None]


@asynccontextmanager
async def between(
    pair: Pair, params: dict[str, Any], *, change: Change, says_so: bool
) -> AsyncIterator[dict[str, Any]]:
    """Stand between the two workers: fetch the KV, change it, and hand it on.

    With `says_so` the digest is that of the changed bytes, as if nobody checked; else the original's.
    """
    ticket = parse_ticket(params)
    tokens = ticket.remote_num_tokens
    engine = TransferEngine(host=HOST)
    memory = HostMemory(tokens * pair.spec.kv_bytes_per_token)
    engine.register(memory.address, memory.nbytes)
    here = Extent(address=memory.address, capacity=tokens)
    client = KvClient()

    async def answer(body: bytes) -> bytes:
        request = parse_request(body)
        if not isinstance(request, Fetch):
            return encode_reply(Released(released=False))
        original = await client.fetch(
            ControlAddress(host=ticket.remote_host, port=ticket.remote_port),
            Fetch(kv_id=request.kv_id, session=engine.session, address=here.address, capacity=tokens),
            5,
        )
        assert isinstance(original, Fetched)
        content = memory.view(0, memory.nbytes)
        change(content)
        there = Extent(address=request.address, capacity=request.capacity)
        await engine.write(
            request.session,
            copy_pieces(pair.spec, here, there, tokens),
            deadline_s=5,
            on_settled=lambda: None,
        )
        digest = digest_of(content) if says_so else original.digest
        return encode_reply(Fetched(digest=digest, nbytes=original.nbytes))

    with zmq.asyncio.Context() as context:
        listener = ControlListener(ControlAddress(host=HOST, port=0), answer, context)
        listener.open()
        try:
            detour = msgspec.structs.replace(ticket, remote_host=HOST, remote_port=listener.port)
            yield msgspec.to_builtins(detour)
        finally:
            await listener.close()
            client.close()
            await engine.close()


def flip_a_byte(content: memoryview) -> None:
    """Change one byte."""
    content[len(content) // 2] ^= 1


def invert_a_layer(content: memoryview) -> None:
    """Change the sign of the first layer's values: float32, the sign is in each fourth byte."""
    part = len(content) // 6
    for i in range(part + 3, 2 * part, 4):
        content[i] ^= 0x80


class TestIntegrity:
    """KV that changes on its way."""

    async def test_a_flipped_byte_is_refused(self, pair: Pair) -> None:
        """One bit of one byte: decode answers 500, counts a refusal, and frees what it had reserved."""
        before = await pair.decode.metric("epdctl_kv_transfers_total", outcome="refused")
        request, _ = await pair.start(text(LONG_QUESTION), [])
        async with between(pair, request["kv_transfer_params"], change=flip_a_byte, says_so=False) as params:
            answer = await pair.decode.ask(**(request | {"kv_transfer_params": params}))

        assert (answer.status, answer.error["code"]) == (500, "kv_undelivered")
        assert "digest" in answer.error["message"]
        assert await pair.decode.metric("epdctl_kv_transfers_total", outcome="refused") == before + 1
        await pair.decode.until_idle()

    async def test_it_is_the_handed_over_kv_that_is_read(self, pair: Pair) -> None:
        """With the digest made to fit, inverting a layer's values changes what is generated."""
        options = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        straight = await pair.ask(text(LONG_QUESTION), [], **options)
        request, _ = await pair.start(text(LONG_QUESTION), [])
        async with between(
            pair, request["kv_transfer_params"], change=invert_a_layer, says_so=True
        ) as params:
            bent = await pair.decode.ask(**(request | options | {"kv_transfer_params": params}))

        assert bent.status == 200, bent.body
        assert bent.body["choices"][0]["token_ids"] != straight.body["choices"][0]["token_ids"]

    async def test_a_ticket_of_another_model_is_refused(self, pair: Pair) -> None:
        """KV of another shape is a 500 that says so, and prefill's lease is given up at once."""
        request, _ = await pair.start(text(COLOUR_QUESTION), [])
        ticket = parse_ticket(request["kv_transfer_params"])
        other = msgspec.structs.replace(ticket, kv_shape=msgspec.structs.replace(ticket.kv_shape, layers=99))
        answer = await pair.decode.ask(**(request | {"kv_transfer_params": msgspec.to_builtins(other)}))

        assert (answer.status, answer.error["code"]) == (500, "kv_undelivered")
        await pair.prefill.until_idle(2)
        await pair.decode.until_idle()


class TestSilence:
    """A prefill that does not answer."""

    async def test_a_silent_prefill_is_a_500_in_time(self, pair: Pair) -> None:
        """After the wait decode answers 500, and the region stays quarantined for late bytes."""
        request, _ = await pair.start(text(COLOUR_QUESTION), [])
        async with silent(request["kv_transfer_params"]) as params:
            answer = await pair.decode.ask(**(request | {"kv_transfer_params": params}))
        quarantined = await pair.decode.metric("epdctl_kv_bytes", state="quarantined")

        assert (answer.status, answer.error["code"]) == (500, "kv_undelivered")
        assert "within 3 s" in answer.error["message"]
        assert quarantined > 0
        await pair.decode.until_idle()

    async def test_a_client_that_leaves_meanwhile_frees_its_place(self, pair: Pair) -> None:
        """A cancelled wait for KV leaves nothing running and nothing used."""
        request, _ = await pair.start(text(COLOUR_QUESTION), [])
        async with silent(request["kv_transfer_params"]) as params:
            leaving = asyncio.create_task(pair.decode.ask(**(request | {"kv_transfer_params": params})))
            await pair.decode.process.wait_until(lambda: _reserved(pair.decode), "KV is reserved")
            leaving.cancel()
            await pair.decode.until_idle(3)

        assert (await pair.decode.ask(text(COLOUR_QUESTION))).status == 200


async def _reserved(worker: Worker) -> bool:
    return await worker.metric("epdctl_kv_bytes", state="used") > 0


@asynccontextmanager
async def silent(params: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Give a ticket whose KV socket takes requests and never answers."""
    ticket: KvTicket = parse_ticket(params)

    async def never(_: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    with zmq.asyncio.Context() as context:
        listener = ControlListener(ControlAddress(host=HOST, port=0), never, context)
        listener.open()
        try:
            yield msgspec.to_builtins(
                msgspec.structs.replace(ticket, remote_host=HOST, remote_port=listener.port)
            )
        finally:
            await listener.close()
