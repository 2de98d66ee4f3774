"""The generation loop and the intake before it, on the tiny model, without processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from epdctl.errors import (
    EmbeddingUndelivered,
    EpdError,
    GenerationFailed,
    InternalFailure,
    Overloaded,
    ShuttingDown,
    TransferFailed,
    UpstreamTimeout,
)
from epdctl.metrics import WorkerMetrics
from epdctl.worker.language.batch import Batch, Key, Limits, Order, Plan
from epdctl.worker.language.checkpoint import open_checkpoint
from epdctl.worker.language.intake import Intake, IntakeRules
from epdctl.worker.language.kv import KvPool, KvRegion
from epdctl.worker.language.loop import GenerationLoop, Job, LoopEvents
from epdctl.worker.language.messages import Generate, PromptImage, Tokens
from epdctl.worker.language.model import LanguageModel, load_language_model
from epdctl.worker.language.params import Sampling
from epdctl.worker.language.positions import mrope_positions
from epdctl.worker.language.runner import Runner, build_prompt
from epdctl.worker.language.sampling import Chosen, Sampler
from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.transfer.ports import Received, TensorSpec
from tests.e2e.tiny_pictures import QWEN2_5_VL
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.unit, pytest.mark.worker]

CPU = torch.device("cpu")


class BrokenRunner(Runner):
    """A runner that fails on steps in which the request called "bad" takes part."""

    def run(self, plan: Plan[KvRegion]) -> dict[Key, Chosen]:
        """Fail or run."""
        if any(segment.key.request_id == "bad" for segment in plan.segments):
            raise RuntimeError("broken on purpose")
        return super().run(plan)


@dataclass
class Bench:
    """A running loop and what it told."""

    spec: ModelSpec
    loop: GenerationLoop
    pool: KvPool
    tokens: dict[str, list[Tokens]] = field(default_factory=dict)
    failures: dict[str, EpdError] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    async def told(self, call_id: str, tokens: Tokens) -> None:
        """Note tokens."""
        self.tokens.setdefault(call_id, []).append(tokens)

    async def failed(self, call_id: str, error: EpdError) -> None:
        """Note a failure."""
        self.failures[call_id] = error

    def submit(self, name: str, length: int = 8, new: int = 6, choices: int = 1) -> None:
        """Submit a text prompt that never stops before its length."""
        sampling = Sampling(max_tokens=new, temperature=0, n=choices)
        self.loop.submit(
            Job(
                order=Order(request_id=name, prompt_tokens=length, max_tokens=new, choices=choices),
                prompt=build_prompt(range(length), mrope_positions(length, [], 2), [], CPU),
                sampler=Sampler(sampling, ()),
                release=lambda: self.released.append(name),
            )
        )

    def count(self, name: str) -> int:
        """Return how many tokens a request has got."""
        return sum(len(tokens.tokens) for tokens in self.tokens.get(name, []))

    def used(self) -> int:
        """Return the KV bytes in use."""
        return self.pool.arena.bytes_by_state()["used"]

    async def idle(self) -> None:
        """Wait until nothing is left to do."""
        await wait_until(lambda: len(self.loop) == 0, "the loop is idle")


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[ModelSpec, LanguageModel]]:
    """Load the tiny model once."""
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(str(QWEN2_5_VL), "auto")
    yield checkpoint.spec, load_language_model(checkpoint, CPU)


@asynccontextmanager
async def running(
    loaded: tuple[ModelSpec, LanguageModel],
    kind: Callable[[LanguageModel], Runner] = Runner,
    *,
    kv_tokens: int = 4096,
    **limits: int,
) -> AsyncIterator[Bench]:
    """Run a loop for the time of the context."""
    spec, model = loaded
    pool = KvPool(spec, kv_tokens * spec.kv_bytes_per_token, CPU)
    settings = {"step_tokens": 64, "sequences": 32, "waiting": 64} | limits
    with ThreadPoolExecutor(1) as thread:
        bench = Bench(spec=spec, loop=None, pool=pool)  # type: ignore[arg-type]
        bench.loop = GenerationLoop(
            Batch(Limits(**settings), pool, kv_tokens=pool.tokens),
            kind(model),
            pool,
            thread,
            events=LoopEvents(tokens=bench.told, failed=bench.failed),
            metrics=WorkerMetrics(),
        )
        task = asyncio.create_task(bench.loop.run())
        try:
            yield bench
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


Loaded = tuple[ModelSpec, LanguageModel]


class TestInterleaving:
    """Streams beside each other."""

    async def test_every_stream_gets_a_token_in_every_step(self, loaded: Loaded) -> None:
        """Of 32 streams none waits a step for another, while long prompts are prefilled beside them."""
        async with running(loaded, sequences=40) as bench:
            for i in range(32):
                bench.submit(f"s{i}", new=40)
            await wait_until(lambda: all(bench.count(f"s{i}") for i in range(32)), "all streams run")
            bench.submit("long", length=400, new=2)
            await bench.idle()

            steps = {name: [t.step for t in tokens] for name, tokens in bench.tokens.items()}

        gaps = [b - a for name, s in steps.items() if name != "long" for a, b in itertools.pairwise(s)]
        assert set(gaps) == {1}
        assert bench.count("long") == 2

    async def test_a_choice_per_step_each(self, loaded: Loaded) -> None:
        """Choices of one request advance together from the step that ends their prompt."""
        async with running(loaded) as bench:
            bench.submit("a", new=3, choices=4)
            await bench.idle()

        assert [len(t.tokens) for t in bench.tokens["a"]] == [4, 4, 4]


class TestLeaving:
    """Requests that end early leave nothing behind."""

    async def test_a_cancelled_request_frees_its_kv(self, loaded: Loaded) -> None:
        """A cancel frees KV and embeddings within a step, and the others go on."""
        async with running(loaded) as bench:
            bench.submit("a", new=2000)
            bench.submit("b", new=8)
            await wait_until(lambda: bench.count("a") > 2, "it runs")
            bench.loop.cancel("a")
            await bench.idle()
            await wait_until(lambda: bench.used() == 0, "KV is free")

        assert (bench.count("b"), sorted(bench.released), bench.failures) == (8, ["a", "b"], {})

    async def test_embeddings_are_released_with_the_first_token(self, loaded: Loaded) -> None:
        """What was pushed for a request is let go as soon as its prompt is computed, once."""
        async with running(loaded) as bench:
            bench.submit("a", new=1000)
            await wait_until(lambda: bench.count("a") > 2, "it runs")
            early = list(bench.released)
            bench.loop.cancel("a")
            await bench.idle()

        assert (early, bench.released) == (["a"], ["a"])

    async def test_a_cancel_before_the_first_step_frees_too(self, loaded: Loaded) -> None:
        """A request that is cancelled at once never computes and still lets go of its embeddings."""
        async with running(loaded) as bench:
            bench.submit("a")
            bench.loop.cancel("a")
            await bench.idle()

        assert (bench.tokens, bench.released, bench.used()) == ({}, ["a"], 0)


class TestFailures:
    """One bad request fails alone."""

    async def test_a_step_fails_only_for_the_request_that_breaks_it(self, loaded: Loaded) -> None:
        """The others of the step get the tokens that they get without it, and the bad one a clear error."""
        async with running(loaded) as bench:
            for name in ("a", "b"):
                bench.submit(name)
            await bench.idle()
        with capture_logs() as logs:
            async with running(loaded, BrokenRunner) as broken:
                for name in ("a", "bad", "b"):
                    broken.submit(name)
                await broken.idle()

        ids = {n: [t.id for step in bench.tokens[n] for t in step.tokens] for n in ("a", "b")}
        assert ids == {n: [t.id for step in broken.tokens[n] for t in step.tokens] for n in ("a", "b")}
        assert [type(error) for error in broken.failures.values()] == [GenerationFailed]
        assert (broken.used(), broken.loop.trouble()) == (0, None)
        assert {line["event"] for line in logs} == {"engine_step_failed"}

    async def test_steps_that_keep_failing_are_a_trouble_until_one_succeeds(self, loaded: Loaded) -> None:
        """Health says so after three failed steps in a row, and forgets it with the next good one."""
        with capture_logs():
            async with running(loaded, BrokenRunner) as bench:
                for _ in range(3):
                    bench.submit("bad")
                    await bench.idle()
                before = bench.loop.trouble()
                bench.submit("good")
                await bench.idle()

        assert (before, bench.loop.trouble()) == ("the last 3 engine steps failed", None)

    async def test_beyond_the_queue_requests_are_refused(self, loaded: Loaded) -> None:
        """What does not fit in the queue is told so, and what does runs."""
        async with running(loaded, sequences=1, waiting=2) as bench:
            for i in range(4):
                bench.submit(str(i))
            await bench.idle()

        assert {name: type(error) for name, error in bench.failures.items()} == {
            "2": Overloaded,
            "3": Overloaded,
        }
        assert [bench.count(name) for name in ("0", "1")] == [6, 6]


class FakeTaker:
    """Hands out what a test puts in, by hash."""

    def __init__(self, outcomes: Mapping[str, Any]) -> None:
        self._outcomes = outcomes
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.expected: list[TensorSpec] = []

    async def take(
        self, *, transfer_id: Any, mm_hash: Any, expect: TensorSpec, deadline_s: float
    ) -> Received:
        """Return, raise or hang."""
        self.expected.append(expect)
        outcome = self._outcomes[mm_hash]
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            await asyncio.Event().wait()
        rows = torch.zeros(expect.shape)
        view = memoryview(rows.view(torch.uint8).numpy()).cast("B")
        return Received(
            view=view,
            shape=expect.shape,
            dtype=expect.dtype,
            mm_hash=mm_hash,
            _on_release=lambda: self.released.append(mm_hash),
        )

    def cancel(self, transfer_id: Any) -> None:
        """Note it."""
        self.cancelled.append(transfer_id)


def generate(*hashes: str) -> Generate:
    """Return a request with an image of one row for each hash."""
    images = tuple(
        PromptImage(mm_hash=h, transfer_id=f"t-{h}", offset=1 + i, rows=1, grid=(1, 2, 2))
        for i, h in enumerate(hashes)
    )
    ids = [1, *[421] * len(hashes), 2]
    return Generate(token_ids=ids, sampling=Sampling(max_tokens=3, temperature=0), images=images)


def intake(bench: Bench, taker: FakeTaker) -> Intake:
    """Return an intake in front of the bench's loop."""
    rules = IntakeRules(push_wait_s=5)
    return Intake(bench.spec, CPU, taker, bench.loop, rules=rules, failed=bench.failed)


class TestIntake:
    """Waiting for embeddings."""

    async def test_a_request_starts_when_its_embeddings_are_there(self, loaded: Loaded) -> None:
        """It takes each image by rows, width and dtype, and releases them after prefill."""
        taker = FakeTaker({"a": 1, "b": 1})
        async with running(loaded) as bench:
            intake(bench, taker).begin("r", generate("a", "b"))
            await wait_until(lambda: bench.count("r") == 3, "it has run")

        assert taker.expected == [TensorSpec((1, 64), "float32")] * 2
        assert (sorted(taker.released), taker.cancelled) == (["a", "b"], [])

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (UpstreamTimeout("late"), "not delivered within 5 s"),
            (TransferFailed("the embedding is [3, 7] where [1, 64] is expected"), r"[3, 7]"),
        ],
    )
    async def test_an_undelivered_embedding_fails_the_request(
        self, loaded: Loaded, error: EpdError, words: str
    ) -> None:
        """The failure is the one that proxies encode again for; what had arrived is given back."""
        taker = FakeTaker({"a": 1, "b": error, "c": None})
        async with running(loaded) as bench:
            waiting = intake(bench, taker)
            waiting.begin("r", generate("a", "b", "c"))
            await wait_until(lambda: "r" in bench.failures and not len(waiting), "it has failed")

        failure = bench.failures["r"]
        assert isinstance(failure, EmbeddingUndelivered)
        assert (failure.http_status, words in failure.message) == (500, True)
        assert (taker.released, sorted(set(taker.cancelled))) == (["a"], ["t-b", "t-c"])

    async def test_a_bug_on_the_way_to_the_loop_costs_that_request(
        self, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is answered as internal, and what had arrived for it is given back."""
        taker = FakeTaker({"a": 1})
        async with running(loaded) as bench:
            waiting = intake(bench, taker)
            monkeypatch.setattr(waiting, "_job", lambda *_: 1 / 0)
            waiting.begin("r", generate("a"))
            await wait_until(lambda: "r" in bench.failures and not len(waiting), "it has failed")

        assert isinstance(bench.failures["r"], InternalFailure)
        assert taker.released == ["a"]

    @pytest.mark.parametrize("started", [True, False])
    async def test_a_cancelled_wait_gives_its_pushes_up(self, loaded: Loaded, started: bool) -> None:
        """A client that leaves while its embeddings are under way leaves nothing waiting or pinned."""
        taker = FakeTaker({"a": 1, "b": None})
        async with running(loaded) as bench:
            waiting = intake(bench, taker)
            waiting.begin("r", generate("a", "b"))
            if started:
                await wait_until(lambda: len(taker.expected) == 2, "it waits")
            was_there = waiting.cancel("r")
            await wait_until(lambda: not len(waiting), "it is gone")

        assert (was_there, bench.failures, bench.tokens) == (True, {}, {})
        assert "t-b" in taker.cancelled
        assert taker.released == (["a"] if started else [])

    async def test_closing_fails_what_waits(self, loaded: Loaded) -> None:
        """At the end of a grace period a request that still waits is told that the worker shuts down."""
        taker = FakeTaker({"a": None})
        async with running(loaded) as bench:
            waiting = intake(bench, taker)
            waiting.begin("r", generate("a"))
            await wait_until(lambda: len(taker.expected) == 1, "it waits")
            await waiting.close()

        assert isinstance(bench.failures["r"], ShuttingDown)
