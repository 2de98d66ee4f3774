"""Admission, chunked prefill, interleaving, ends and cancels of the language engine's batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from epdctl.errors import InvalidRequest, Overloaded
from epdctl.worker.language.batch import Batch, Key, Limits, Order, Plan, Sampled

pytestmark = pytest.mark.unit

EOS = 9


@dataclass
class CountedKv:
    """KV space of `total` tokens; a region is its size and a serial number."""

    total: int
    used: int = 0
    serial: Iterator[int] = field(default_factory=lambda: iter(range(10_000_000)))
    live: set[tuple[int, int]] = field(default_factory=set)

    def allocate(self, tokens: int) -> tuple[int, int] | None:
        """Give room while there is some."""
        if self.used + tokens > self.total:
            return None
        region = (tokens, next(self.serial))
        self.used += tokens
        self.live.add(region)
        return region

    def free(self, region: tuple[int, int]) -> None:
        """Take back; twice is an error."""
        self.live.remove(region)
        self.used -= region[0]


def build(
    *, step_tokens: int = 16, sequences: int = 4, waiting: int = 8, kv: int = 1000
) -> tuple[Batch[tuple[int, int]], CountedKv]:
    """Return a batch and its KV space."""
    space = CountedKv(kv)
    limits = Limits(step_tokens=step_tokens, sequences=sequences, waiting=waiting)
    return Batch(limits, space, kv_tokens=kv), space


def order(name: str, prompt: int, new: int = 4, **rest: object) -> Order:
    """Return an order that EOS ends."""
    return Order(request_id=name, prompt_tokens=prompt, max_tokens=new, stops=frozenset({EOS}), **rest)  # type: ignore[arg-type]


def shape(plan: Plan[tuple[int, int]] | None) -> list[tuple[str, int, int, int]]:
    """Return (request, start, count, how many sample) of each segment."""
    assert plan is not None
    return [(s.key.request_id, s.start, s.count, len(s.samples)) for s in plan.segments]


def step(batch: Batch[tuple[int, int]], token: int = 1) -> list[Sampled[tuple[int, int]]]:
    """Plan a step and commit `token` for whoever samples."""
    plan = batch.plan()
    assert plan is not None
    return batch.commit(plan, {key: token for s in plan.segments for key in s.samples})


class TestPrefill:
    """Prompts are computed in chunks that fit beside the running streams."""

    def test_a_long_prompt_is_cut_to_the_step(self) -> None:
        """A prompt longer than the step's budget takes several steps and samples in the last."""
        batch, _ = build(step_tokens=16)
        batch.submit(order("a", 40))
        shapes = []
        for _ in range(3):
            plan = batch.plan()
            shapes += shape(plan)
            assert plan is not None
            batch.commit(plan, dict.fromkeys((k for s in plan.segments for k in s.samples), 1))

        assert shapes == [("a", 0, 16, 0), ("a", 16, 16, 0), ("a", 32, 8, 1)]

    def test_running_streams_get_a_token_in_every_step_of_a_long_prefill(self) -> None:
        """No stream waits a single step while another request's prompt is computed."""
        batch, _ = build(step_tokens=16)
        batch.submit(order("stream", 4, 50))
        step(batch)
        batch.submit(order("long", 60))
        seen = [shape(batch.plan())[0]]
        for _ in range(3):
            step(batch)
            seen.append(shape(batch.plan())[0])

        assert [("stream", 4 + i, 1, 1) for i in range(4)] == seen

    def test_the_rest_of_a_step_goes_to_the_next_prompt(self) -> None:
        """What the oldest prompt leaves of the budget is used by the one behind it."""
        batch, _ = build(step_tokens=16)
        batch.submit(order("a", 10))
        batch.submit(order("b", 10))

        assert shape(batch.plan()) == [("a", 0, 10, 1), ("b", 0, 6, 0)]

    def test_a_step_without_room_for_a_prompt_is_refused_at_start(self) -> None:
        """Limits under which running streams could starve prompts for ever do not exist."""
        with pytest.raises(ValueError, match="one of a prompt"):
            Limits(step_tokens=8, sequences=8, waiting=1)


class TestAdmission:
    """KV for all a request may need, first come first served."""

    def test_a_request_that_does_not_fit_waits_for_kv(self) -> None:
        """The second request starts in the step after the first has given its KV back."""
        batch, _ = build(kv=20)
        batch.submit(order("a", 10, 2))
        batch.submit(order("b", 10, 2))
        step(batch)
        before = batch.waiting
        step(batch)
        after = shape(batch.plan())

        assert (before, after) == (1, [("b", 0, 10, 1)])

    def test_nobody_passes_the_head_of_the_queue(self) -> None:
        """A small request behind a large one waits, so that the large one is not starved."""
        batch, _ = build(kv=30)
        batch.submit(order("running", 10, 5))
        step(batch)
        batch.submit(order("large", 20, 5))
        batch.submit(order("small", 2, 1))

        assert [name for name, *_ in shape(batch.plan())] == ["running"]

    def test_more_choices_than_free_sequences_wait(self) -> None:
        """A request with n choices needs n places at once."""
        batch, _ = build(sequences=4)
        batch.submit(order("a", 3))
        batch.submit(order("b", 3, choices=4))
        batch.plan()

        assert (batch.running, batch.waiting) == (1, 1)

    def test_partial_allocation_is_given_back(self) -> None:
        """When the KV is enough for some choices only, none of it stays taken."""
        batch, kv = build(kv=30)
        batch.submit(order("a", 6, 4))
        step(batch)
        batch.submit(order("b", 6, 4, choices=3))
        batch.plan()

        assert kv.used == 10

    def test_a_request_that_never_fits_is_refused(self) -> None:
        """Waiting would not help a request that needs more KV than there is: 400 names the field."""
        batch, _ = build(kv=20)
        with pytest.raises(InvalidRequest) as refused:
            batch.submit(order("a", 10, 11))

        assert refused.value.param == "max_tokens"

    def test_more_choices_than_sequences_are_refused(self) -> None:
        """`n` above what can ever run at once is a client error."""
        batch, _ = build(sequences=2)
        with pytest.raises(InvalidRequest) as refused:
            batch.submit(order("a", 1, choices=3))

        assert refused.value.param == "n"
        assert "(--max-batch-items)" in refused.value.message

    def test_the_queue_is_bounded(self) -> None:
        """A full queue answers Overloaded with a hint when to come again."""
        batch, _ = build(waiting=2)
        batch.submit(order("a", 1))
        batch.submit(order("b", 1))
        with pytest.raises(Overloaded) as refused:
            batch.submit(order("c", 1))

        assert refused.value.retry_after_s == 1
        assert "(--queue-size)" in refused.value.message


class TestEnds:
    """A sequence leaves once, and its KV with it."""

    def test_length_ends_a_sequence(self) -> None:
        """After max_tokens tokens the sequence has finished with `length`."""
        batch, kv = build()
        batch.submit(order("a", 3, 2))
        finishes = [event.finish for _ in range(2) for event in step(batch)]

        assert (finishes, kv.used, batch.plan()) == ([None, "length"], 0, None)

    def test_a_stop_token_ends_a_sequence(self) -> None:
        """An end token finishes with `stop` at once."""
        batch, kv = build()
        batch.submit(order("a", 3))
        finishes = [event.finish for event in step(batch, EOS)]

        assert (finishes, kv.used) == (["stop"], 0)

    def test_a_stop_token_counts_from_min_tokens_on(self) -> None:
        """Before min_tokens tokens an end token ends nothing."""
        batch, _ = build()
        batch.submit(order("a", 3, 5, min_tokens=2))
        finishes = [event.finish for _ in range(3) for event in step(batch, EOS)]

        assert finishes == [None, None, "stop"]

    def test_a_held_region_outlives_its_request(self) -> None:
        """With `hold` the region is handed over, not freed."""
        batch, kv = build()
        batch.submit(order("a", 3, 1, hold=True))
        (event,) = step(batch)

        assert (event.held in kv.live, batch.plan()) == (True, None)

    def test_positions_count_from_the_first_generated_token(self) -> None:
        """Events number a sequence's tokens from 0."""
        batch, _ = build()
        batch.submit(order("a", 3, 3))

        assert [event.position for _ in range(3) for event in step(batch)] == [0, 1, 2]


class TestChoices:
    """n choices share one prefill."""

    def test_all_choices_sample_from_the_prompts_last_row(self) -> None:
        """The prompt is computed once, and each choice takes a token of its own from it."""
        batch, _ = build()
        batch.submit(order("a", 5, choices=3))
        plan = batch.plan()

        assert plan is not None
        assert [s.samples for s in plan.segments] == [(Key("a", 0), Key("a", 1), Key("a", 2))]

    def test_choices_go_on_without_those_that_ended(self) -> None:
        """When a choice ends the others keep running from their own KV."""
        batch, kv = build()
        batch.submit(order("a", 5, choices=3))
        plan = batch.plan()
        assert plan is not None
        batch.commit(plan, {Key("a", 0): EOS, Key("a", 1): 1, Key("a", 2): 1})
        plan = batch.plan()
        assert plan is not None

        assert ([s.key.index for s in plan.segments], kv.used) == ([1, 2], 18)

    def test_the_first_choice_dropped_early_leaves_the_prompt_to_the_next(self) -> None:
        """The choice that computes the prompt is whichever is first among those left."""
        batch, _ = build(step_tokens=5)
        batch.submit(order("a", 5, choices=2))
        batch.plan()
        batch.cancel("a", 0)

        assert shape(batch.plan()) == [("a", 0, 5, 1)]


class TestCancel:
    """A request may leave at any time between two steps."""

    def test_a_waiting_request_just_leaves(self) -> None:
        """Cancelling a queued request takes it out of the queue."""
        batch, _ = build()
        batch.submit(order("a", 3))

        assert (batch.cancel("a"), batch.plan()) == (True, None)

    def test_a_running_request_frees_its_kv(self) -> None:
        """Cancelling a running request gives back the KV of all its choices."""
        batch, kv = build()
        batch.submit(order("a", 3, choices=3))
        step(batch)

        assert (batch.cancel("a"), kv.used) == (True, 0)

    def test_cancelling_twice_changes_nothing(self) -> None:
        """A cancel for something that is gone is harmless."""
        batch, kv = build()
        batch.submit(order("a", 3))
        step(batch)
        batch.cancel("a")

        assert (batch.cancel("a"), kv.used) == (False, 0)

    def test_dropping_one_choice_keeps_the_others(self) -> None:
        """A single choice may be dropped alone."""
        batch, kv = build()
        batch.submit(order("a", 3, choices=2))
        step(batch)
        batch.cancel("a", 0)

        assert ([name for name, *_ in shape(batch.plan())], kv.used) == (["a"], 7)


class TestImports:
    """KV that comes from another process."""

    def test_an_import_computes_nothing_before_its_kv_is_there(self) -> None:
        """An admitted import shows in the plan once and has no segment."""
        batch, _ = build()
        batch.submit(order("a", 8, imported=True))
        plan = batch.plan()

        assert plan is not None
        assert (list(plan.imports), plan.segments, batch.plan()) == ([Key("a", 0)], (), None)

    def test_the_last_prompt_token_is_computed_again(self) -> None:
        """With its KV in place the request goes on like one whose prompt is all but done."""
        batch, _ = build()
        batch.submit(order("a", 8, imported=True))
        batch.plan()
        batch.imported("a")

        assert shape(batch.plan()) == [("a", 7, 1, 1)]

    def test_a_lost_import_leaves_its_region_to_whoever_wrote_it(self) -> None:
        """Detaching frees the other choices' KV, and not the region that may still be written to."""
        batch, kv = build()
        batch.submit(order("a", 8, imported=True, choices=2))
        plan = batch.plan()
        assert plan is not None
        batch.detach("a")
        batch.detach("a")

        assert (kv.live, batch.running) == (set(plan.imports.values()), 0)


def test_any_order_of_events_keeps_the_accounts() -> None:
    """Over 20,000 random events KV is never over-committed and ends at zero; steps keep their limits."""
    draw = random.Random(7)
    batch, kv = build(step_tokens=12, sequences=5, waiting=6, kv=120)
    names: list[str] = []
    for i in range(20_000):
        if draw.random() < 0.3:
            try:
                batch.submit(
                    order(str(i), draw.randint(1, 30), draw.randint(1, 6), choices=draw.choice([1, 1, 2]))
                )
                names.append(str(i))
            except Overloaded:
                pass
        if names and draw.random() < 0.1:
            batch.cancel(draw.choice(names), draw.choice([None, 0, 1]))
        plan = batch.plan()
        if plan is None:
            continue
        assert sum(s.count for s in plan.segments) <= 12
        assert batch.running <= 5
        tokens = {key: draw.choice([1, 1, 1, EOS]) for s in plan.segments for key in s.samples}
        batch.commit(plan, tokens)
    while batch.plan() is not None:
        step(batch)

    assert (kv.used, kv.live, batch.running, batch.waiting) == (0, set(), 0, 0)
