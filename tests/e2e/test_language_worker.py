"""Claims about a prefill_decode worker as a process, fed by a real producer over Mooncake."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.language_worker import MODEL, Answer, Producer, Worker, language_worker, parse_event, rewritten
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
from tests.e2e.tower import Encoded, Tower

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.worker,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

PUSH_WAIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A worker, a producer for it, and the same checkpoint run whole."""

    worker: Worker
    producer: Producer
    reference: Reference

    async def ask(self, messages: list[Message], pictures: list[Picture], **fields: Any) -> Answer:
        """Push the pictures and send the request as the proxy rewrites it."""
        request = await self.producer.prepare(self.worker.consumer_zmq, messages, pictures)
        rest = {name: value for name, value in request.items() if name != "messages"}
        return await self.worker.ask(request["messages"], **rest, **fields)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[QWEN2_5_VL, QWEN3_VL], ids=["qwen2_5_vl", "qwen3_vl"]
)
async def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    """Run a worker of each checkpoint, with small steps so that prompts are cut in chunks."""
    folder: Path = request.param
    flags = ("--push-wait-timeout", str(PUSH_WAIT_S), "--max-batch-tokens", "64", "--max-batch-items", "32")
    producer = Producer(Tower(folder))
    async with language_worker(folder, tmp_path_factory.mktemp("logs"), *flags) as worker:
        yield Bench(worker=worker, producer=producer, reference=Reference(folder))
    await producer.close()


class TestAnswers:
    """What it answers."""

    async def test_golden_tokens_equal_the_whole_networks(self, bench: Bench) -> None:
        """20 mixed requests at once, all interleaved, give transformers' own tokens, id for id."""
        requests = mixed(20, first=700)
        answers = await asyncio.gather(
            *(bench.ask(messages, pictures, return_token_ids=True) for messages, pictures in requests)
        )
        expected = [bench.reference.answer(messages, 32) for messages, _ in requests]
        choices = [answer.body["choices"][0] for answer in answers]

        assert [tuple(choice["token_ids"]) for choice in choices] == [e.token_ids for e in expected]
        assert [tuple(a.body["prompt_token_ids"]) for a in answers] == [e.prompt_token_ids for e in expected]
        assert [choice["message"]["content"] for choice in choices] == [e.text for e in expected]

    async def test_pictures_are_answered_in_order(self, bench: Bench) -> None:
        """Two pictures in one message are named in their order."""
        pictures = list(held_out_pictures(2, first=760))
        answer = await bench.ask(ask(pictures), pictures)

        assert answer.text == expected_answer(pictures)

    async def test_swapped_embeddings_swap_the_answers(self, bench: Bench) -> None:
        """It is the pushed embedding that is read, not anything in the request."""
        pictures = list(held_out_pictures(2, first=780))
        first, second = bench.producer.encode(pictures)
        answers = []
        for shown, encoded, pushed in ((pictures[0], first, second), (pictures[1], second, first)):
            item = {"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex}
            await bench.producer.push(
                bench.worker.consumer_zmq, encoded, data=stretched(pushed, len(encoded.rows)), **item
            )
            answers.append((await bench.worker.ask(**rewritten(ask([shown]), [encoded], [item]))).text)

        assert answers == [expected_answer([pictures[1]]), expected_answer([pictures[0]])]

    async def test_inverted_rows_change_the_answer(self, bench: Bench) -> None:
        """With a digest that fits the wrong rows, nothing stops them, and the answer is another one."""
        picture = held_out_pictures(1, first=790)[0]
        (encoded,) = bench.producer.encode([picture])
        inverted = (-encoded.rows).contiguous().numpy().tobytes()
        item = {"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex}
        await bench.producer.push(bench.worker.consumer_zmq, encoded, data=inverted, **item)

        answer = await bench.worker.ask(**rewritten(ask([picture]), [encoded], [item]))

        assert answer.status == 200
        assert answer.text != expected_answer([picture])

    async def test_an_embedding_is_used_again_by_its_hash(self, bench: Bench) -> None:
        """A second request that names the same item needs no second push."""
        pictures = list(held_out_pictures(1, first=810))
        request = await bench.producer.prepare(bench.worker.consumer_zmq, ask(pictures), pictures)
        first = await bench.worker.ask(**request)
        again = await bench.worker.ask(request["messages"])

        assert (first.text, again.text) == (expected_answer(pictures),) * 2

    async def test_two_identical_pictures_fill_two_places(self, bench: Bench) -> None:
        """Two parts with one hash and two transfer ids are both answered."""
        picture = held_out_pictures(1, first=811)[0]
        (encoded,) = bench.producer.encode([picture])
        mm_hash = uuid.uuid4().hex
        items = [{"mm_hash": mm_hash, "transfer_id": uuid.uuid4().hex} for _ in range(2)]
        for item in items:
            await bench.producer.push(bench.worker.consumer_zmq, encoded, **item)
        request = rewritten(ask([picture, picture]), [encoded, encoded], items)

        assert (await bench.worker.ask(**request)).text == expected_answer([picture, picture])

    async def test_completions_continue_a_text(self, bench: Bench) -> None:
        """/v1/completions answers two prompts with the tokens the whole network gives to the chat prompt."""
        reference = bench.reference.answer(text(LONG_QUESTION), 8)
        prompts = [list(reference.prompt_token_ids)] * 2
        body = {
            "model": MODEL,
            "prompt": prompts,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = await bench.worker.post("/v1/completions", body)

        assert [tuple(c["token_ids"]) for c in answer.body["choices"]] == [reference.token_ids] * 2
        assert [c["index"] for c in answer.body["choices"]] == [0, 1]


def stretched(encoded: Encoded, rows: int) -> bytes:
    """Return a picture's embedding with another number of rows: a picture has one colour all over."""
    return encoded.rows.repeat(rows // len(encoded.rows) + 1, 1)[:rows].numpy().tobytes()


class TestStreams:
    """Streaming."""

    async def test_a_stream_says_what_the_whole_answer_says(self, bench: Bench) -> None:
        """Chunks joined equal the text, the last has the reason, usage and [DONE] come at the end."""
        whole = await bench.worker.ask(text(LONG_QUESTION), max_tokens=64)
        stream = await bench.worker.ask(
            text(LONG_QUESTION), max_tokens=64, stream=True, stream_options={"include_usage": True}
        )
        *chunks, usage, done = stream.events

        assert (stream.text, done) == (whole.text, None)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == [None, "stop"]
        assert {k: whole.body["usage"][k] for k in usage["usage"]} == usage["usage"]
        assert len({chunk["id"] for chunk in stream.events if chunk}) == 1

    async def test_chunks_come_as_they_are_made(self, bench: Bench) -> None:
        """Of 16 streams all have their first text before any has its last."""
        began: list[int] = []
        ended: list[int] = []

        async def watch(number: int) -> None:
            body = {"model": MODEL, "messages": text(LONG_QUESTION), "max_tokens": 200, "temperature": 0}
            sent = body | {"stream": True, "ignore_eos": True}
            url = bench.worker.url + "/v1/chat/completions"
            async with bench.worker.session.post(url, json=sent) as answer:
                async for _ in answer.content.iter_any():
                    began.append(number) if number not in began else None
                ended.append(len(began))

        await asyncio.gather(*(watch(number) for number in range(16)))

        assert ended == [16] * 16

    async def test_requests_at_once_share_steps(self, bench: Bench) -> None:
        """16 requests together take little more engine steps than the longest of them alone."""
        before = await bench.worker.metric("epdctl_steps_total")
        answers = await asyncio.gather(
            *(
                bench.worker.ask(text(LONG_QUESTION), max_tokens=100, min_tokens=100, ignore_eos=True)
                for _ in range(16)
            )
        )
        await bench.worker.until_idle()
        steps = await bench.worker.metric("epdctl_steps_total") - before
        tokens = sum(answer.body["usage"]["completion_tokens"] for answer in answers)

        assert tokens == 1600
        assert steps < 300

    async def test_a_stop_string_never_shows(self, bench: Bench) -> None:
        """Text ends before the stop string, in a stream as in a whole answer, and the reason is named."""
        free = (await bench.worker.ask(text(LONG_QUESTION), ignore_eos=True, max_tokens=16)).text
        stop = free[6:11]
        options = {"stop": [stop], "ignore_eos": True, "max_tokens": 16}
        whole = await bench.worker.ask(text(LONG_QUESTION), **options)
        stream = await bench.worker.ask(text(LONG_QUESTION), stream=True, **options)
        choice = whole.body["choices"][0]
        last = [event for event in stream.events if event][-1]["choices"][0]

        assert (whole.text, stream.text) == (free.split(stop)[0],) * 2
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        await bench.worker.until_idle()

    async def test_choices_stream_side_by_side(self, bench: Bench) -> None:
        """n choices of one prompt come in one stream, each to its own end."""
        options = {"n": 3, "temperature": 1, "seed": 11, "max_tokens": 12, "ignore_eos": True}
        stream = await bench.worker.ask(text(LONG_QUESTION), stream=True, **options)
        whole = await bench.worker.ask(text(LONG_QUESTION), **options)
        texts = ["", "", ""]
        for event in stream.events:
            for choice in event["choices"] if event else []:
                texts[choice["index"]] += choice["delta"].get("content") or ""

        assert texts == [choice["message"]["content"] for choice in whole.body["choices"]]
        assert whole.body["usage"]["completion_tokens"] == 36

    async def test_a_choice_that_stops_leaves_the_others_running(self, bench: Bench) -> None:
        """A stop string ends the choice it is in; the others go on to their length."""
        options = {"n": 4, "temperature": 50, "seed": 3, "max_tokens": 20, "ignore_eos": True}
        free = await bench.worker.ask(text(LONG_QUESTION), **options)
        texts = [choice["message"]["content"] for choice in free.body["choices"]]
        stop = next(
            t[i : i + 4]
            for t in texts
            for i in range(len(t) - 4)
            if sum(t[i : i + 4] in o for o in texts) == 1
        )
        cut = await bench.worker.ask(text(LONG_QUESTION), stop=stop, **options)

        assert [c["message"]["content"] for c in cut.body["choices"]] == [t.split(stop)[0] for t in texts]
        assert sorted(c["finish_reason"] for c in cut.body["choices"]) == ["length"] * 3 + ["stop"]
        await bench.worker.until_idle()


class TestSampling:
    """Choosing tokens."""

    async def test_a_seed_repeats_its_answer_in_any_company(self, bench: Bench) -> None:
        """A seeded request gives the same tokens alone and among others."""
        options = {"temperature": 1.2, "seed": 7, "max_tokens": 24, "ignore_eos": True}
        alone = await bench.worker.ask(text(LONG_QUESTION), **options)
        others = [bench.worker.ask(text(COLOUR_QUESTION), temperature=1, max_tokens=40) for _ in range(8)]
        among, *_ = await asyncio.gather(bench.worker.ask(text(LONG_QUESTION), **options), *others)

        assert among.text == alone.text

    async def test_without_a_seed_answers_differ(self, bench: Bench) -> None:
        """Requests without a seed draw anew each time."""
        options = {"temperature": 2, "max_tokens": 24, "ignore_eos": True}
        answers = await asyncio.gather(*(bench.worker.ask(text(LONG_QUESTION), **options) for _ in range(4)))

        assert len({answer.text for answer in answers}) == 4

    async def test_logprobs_are_reported_for_each_token(self, bench: Bench) -> None:
        """Every token has its log probability and alternatives, the likeliest first, in a stream too."""
        options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, "ignore_eos": True}
        whole = await bench.worker.ask(text(LONG_QUESTION), **options)
        stream = await bench.worker.ask(text(LONG_QUESTION), stream=True, **options)
        entries = whole.body["choices"][0]["logprobs"]["content"]
        streamed = [
            entry
            for event in stream.events
            for choice in (event["choices"] if event else [])
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]

        assert [entry["token"] for entry in entries] == [
            entry["top_logprobs"][0]["token"] for entry in entries
        ]
        assert len(entries) == 6
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
        assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)

    async def test_ignore_eos_and_min_tokens_hold_the_end_back(self, bench: Bench) -> None:
        """ignore_eos runs to the length; min_tokens keeps the end token out until then."""
        ignored = await bench.worker.ask(text(COLOUR_QUESTION), ignore_eos=True, max_tokens=12)
        minimum = await bench.worker.ask(text(COLOUR_QUESTION), min_tokens=9, max_tokens=30)

        assert ignored.body["choices"][0]["finish_reason"] == "length"
        assert ignored.body["usage"]["completion_tokens"] == 12
        assert minimum.body["usage"]["completion_tokens"] >= 10


class TestRefusals:
    """What is wrong with a request is said before anything runs."""

    @pytest.mark.parametrize(
        ("change", "status", "param"),
        [
            ({"temperature": -3}, 400, "temperature"),
            ({"model": "nope"}, 404, "model"),
            ({"messages": None}, 400, "messages"),
            ({"max_tokens": 5000}, 400, "max_tokens"),
            ({"n": 33}, 400, "n"),
            ({"response_format": {"type": "json_object"}}, 400, "response_format"),
            ({"messages": [{"role": "user", "content": "x y " * 3000}]}, 400, "messages"),
            ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, 400, "messages"),
            ({"ec_transfer_params": {"ec_items": 5}}, 400, "ec_transfer_params.ec_items"),
        ],
    )
    async def test_a_wrong_field_is_named(
        self, bench: Bench, change: dict[str, Any], status: int, param: str
    ) -> None:
        """A bad request gets its status and the name of the field, and the next good one works."""
        body = {"model": MODEL, "messages": text(COLOUR_QUESTION), "max_tokens": 4} | change
        refused = await bench.worker.post("/v1/chat/completions", body)
        good = await bench.worker.ask(text(COLOUR_QUESTION), max_tokens=4)

        assert (refused.status, refused.error["param"], good.status) == (status, param, 200)

    async def test_a_raw_picture_is_refused_with_the_way_out(self, bench: Bench) -> None:
        """A worker without a tower says that the request must come through the proxy."""
        refused = await bench.worker.ask(ask(list(held_out_pictures(1))))

        assert (refused.status, refused.error["code"]) == (400, "unsupported_media")
        assert "proxy" in refused.error["message"]

    @pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": 1} x', b"[" * 100_000])
    async def test_a_malformed_body_is_a_client_error(self, bench: Bench, data: bytes) -> None:
        """What is no JSON object is a 400, and nothing dies of it."""
        refused = await bench.worker.post("/v1/chat/completions", data)

        assert (refused.status, refused.error["code"]) == (400, "invalid_request")
        assert (await bench.worker.health())[0] == 200

    async def test_other_paths_are_not_served(self, bench: Bench) -> None:
        """Endpoints of `/v1/` that this worker does not have are 501, others 404, both as JSON."""
        refused = await bench.worker.post("/v1/embeddings", {})
        unknown = await bench.worker.post("/no/such/path", {})

        assert (refused.status, refused.body["error"]["code"]) == (501, "unsupported_endpoint")
        assert (unknown.status, "error" in unknown.body) == (404, True)

    async def test_the_request_id_is_echoed(self, bench: Bench) -> None:
        """The client's request id comes back in header and answer id, in streams and errors too."""
        headers = {"x-request-id": "req-1"}
        whole = await bench.worker.ask(text(COLOUR_QUESTION), headers=headers)
        stream = await bench.worker.ask(text(COLOUR_QUESTION), headers=headers, stream=True)
        error = await bench.worker.ask(text(COLOUR_QUESTION), headers=headers, n=0)

        assert [a.headers["x-request-id"] for a in (whole, stream, error)] == ["req-1"] * 3
        assert (whole.body["id"], stream.events[0]["id"]) == ("chatcmpl-req-1",) * 2


class TestEmbeddings:
    """Embeddings that are wrong or do not come."""

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_push_that_never_comes_is_a_500(self, bench: Bench, stream: bool) -> None:
        """After the wait the status is the 500 that proxies encode again for, also for a stream."""
        pictures = list(held_out_pictures(1))
        items = [{"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex}]
        request = rewritten(ask(pictures), bench.producer.encode(pictures), items)
        answer = await bench.worker.ask(**request, stream=stream)

        assert (answer.status, answer.error["code"]) == (500, "embedding_undelivered")
        assert "within 2 s" in answer.error["message"]
        await bench.worker.until_idle()

    async def test_others_go_on_while_a_push_is_awaited(self, bench: Bench) -> None:
        """A request that waits for its embedding holds nobody up."""
        pictures = list(held_out_pictures(1))
        items = [{"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex}]
        request = rewritten(ask(pictures), bench.producer.encode(pictures), items)
        waiting = asyncio.create_task(bench.worker.ask(**request))
        answers = await asyncio.gather(*(bench.worker.ask(text(COLOUR_QUESTION)) for _ in range(5)))
        still_waiting = not waiting.done()
        await waiting

        assert ([a.status for a in answers], still_waiting) == ([200] * 5, True)

    async def test_wrong_rows_are_refused_before_the_model_sees_them(self, bench: Bench) -> None:
        """An item with a row too few for the grid is a 500 that names both shapes, and is dropped."""
        pictures = list(held_out_pictures(1, first=40))
        (encoded,) = bench.producer.encode(pictures)
        rows, width = encoded.rows.shape
        item = {"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex}
        short = encoded.data[: (rows - 1) * width * 4]
        await bench.producer.push(
            bench.worker.consumer_zmq, encoded, shape=(rows - 1, width), data=short, **item
        )
        answer = await bench.worker.ask(**rewritten(ask(pictures), [encoded], [item]))

        assert (answer.status, answer.error["code"]) == (500, "embedding_undelivered")
        assert f"[{rows}, {width}]" in answer.error["message"]
        await bench.worker.until_idle()

    async def test_a_push_that_comes_late_is_waited_for(self, bench: Bench) -> None:
        """The request may be there before its embedding."""
        pictures = list(held_out_pictures(1, first=41))
        (encoded,) = bench.producer.encode(pictures)
        item = {"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex}
        request = asyncio.create_task(bench.worker.ask(**rewritten(ask(pictures), [encoded], [item])))
        await bench.worker.process.wait_until(lambda: _in_flight(bench.worker), "the request is in flight")
        await bench.producer.push(bench.worker.consumer_zmq, encoded, **item)

        assert (await request).text == expected_answer(pictures)


async def _in_flight(worker: Worker) -> bool:
    return await worker.metric("epdctl_in_flight") > 0


class TestLeaving:
    """Clients that leave."""

    async def test_a_stream_that_is_left_frees_everything(self, bench: Bench) -> None:
        """When a client goes away in the middle of its stream, sequence and KV are freed at once."""
        body = {
            "model": MODEL,
            "messages": text(LONG_QUESTION),
            "max_tokens": 3500,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            aiohttp.ClientSession() as leaving,
            leaving.post(bench.worker.url + "/v1/chat/completions", json=body) as answer,
        ):
            await answer.content.readany()
            assert await bench.worker.metric("epdctl_kv_bytes", state="used") > 0
        await bench.worker.until_idle(5)

        assert await bench.worker.metric("epdctl_kv_bytes", state="used") == 0

    async def test_a_wait_for_an_embedding_that_is_left_frees_everything(self, bench: Bench) -> None:
        """A client that leaves before its embedding has come leaves no wait and no reservation behind."""
        pictures = list(held_out_pictures(1, first=42))
        (encoded,) = bench.producer.encode(pictures)
        item = {"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex}
        request = asyncio.create_task(bench.worker.ask(**rewritten(ask(pictures), [encoded], [item])))
        await bench.worker.process.wait_until(lambda: _in_flight(bench.worker), "it is in flight")
        request.cancel()
        await bench.worker.until_idle(5)
        pushed = await bench.producer.push(bench.worker.consumer_zmq, encoded, **item)

        assert pushed.outcome.value == "cancelled"


class TestEdge:
    """The common routes."""

    async def test_models_and_version_are_told(self, bench: Bench) -> None:
        """The served name and the longest request are listed."""
        async with bench.worker.session.get(bench.worker.url + "/v1/models") as answer:
            listed = await answer.json()

        assert (listed["data"][0]["id"], listed["data"][0]["max_model_len"]) == (MODEL, 4096)

    async def test_transfers_are_counted(self, bench: Bench) -> None:
        """Pushed items show in the consumer's counters with their bytes."""
        before = await bench.worker.metric("epdctl_ec_bytes_total", side="consumer")
        pictures = list(held_out_pictures(1, first=43))
        (encoded,) = bench.producer.encode(pictures)
        await bench.ask(ask(pictures), pictures)

        assert await bench.worker.metric("epdctl_ec_bytes_total", side="consumer") - before == len(
            encoded.data
        )

    async def test_a_stream_is_parsable_to_its_end(self, bench: Bench) -> None:
        """Every block of a stream is one event, and the last is [DONE]."""
        stream = await bench.worker.ask(text(LONG_QUESTION), stream=True, n=2, logprobs=True)

        assert (stream.events[-1], parse_event('data: {"a": 1}')) == (None, {"a": 1})


async def test_requests_without_max_tokens_fit_a_small_kv_memory(tmp_path: Path) -> None:
    """KV for 1024 tokens where the context has 4096: such a request runs with what fits, or with
    --default-max-tokens where that is less; one that names more than fits is told which flags help."""
    flags = ("--kv-bytes", str(1024 * 768), "--default-max-tokens", "300")
    endless = {"ignore_eos": True, "max_tokens": None}
    async with language_worker(QWEN2_5_VL, tmp_path, *flags) as worker:
        one, four, named = await asyncio.gather(
            worker.ask(text(COLOUR_QUESTION), **endless),
            worker.ask(text(COLOUR_QUESTION), n=4, **endless),
            worker.ask(text(COLOUR_QUESTION), **endless | {"max_tokens": 2000}),
        )

    used, prompt = one.body["usage"], one.body["usage"]["prompt_tokens"]
    assert (one.status, used["completion_tokens"]) == (200, 300)
    assert (four.status, four.body["usage"]["completion_tokens"]) == (200, 4 * (256 - prompt))
    assert (named.status, named.error["param"]) == (400, "max_tokens")
    assert "--kv-bytes" in named.error["message"]
