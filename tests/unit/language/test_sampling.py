"""Logits to tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from epdctl.worker.language.params import Sampling
from epdctl.worker.language.sampling import Sampler, draw_seed

pytestmark = [pytest.mark.unit, pytest.mark.worker]

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])
EOS = 1


def sampler(**rest: Any) -> Sampler:
    """Return a sampler whose end token is 1."""
    return Sampler(Sampling(max_tokens=10, **rest), [EOS])


def draws(one: Sampler, count: int = 400) -> Counter[int]:
    """Return how often each token comes at `count` different positions."""
    return Counter(one.choose(LOGITS, choice=0, position=i).token for i in range(count))


def test_temperature_zero_takes_the_best() -> None:
    """Greedy choice is the largest logit."""
    assert sampler(temperature=0).choose(LOGITS, choice=0, position=0).token == 1


def test_draws_follow_the_distribution() -> None:
    """At temperature 1 tokens come about as often as softmax says."""
    shares = torch.softmax(LOGITS, dim=0)
    counts = draws(sampler(seed=5), 4000)

    assert all(abs(counts[i] / 4000 - float(share)) < 0.03 for i, share in enumerate(shares))


def test_the_same_seed_gives_the_same_tokens() -> None:
    """A seed fixes every draw; another seed, choice or position draws anew."""
    first = [sampler(seed=1).choose(LOGITS, choice=0, position=i).token for i in range(50)]
    again = [sampler(seed=1).choose(LOGITS, choice=0, position=i).token for i in range(50)]
    other_seed = [sampler(seed=2).choose(LOGITS, choice=0, position=i).token for i in range(50)]
    other_choice = [sampler(seed=1).choose(LOGITS, choice=1, position=i).token for i in range(50)]

    assert first == again
    assert first != other_seed
    assert first != other_choice


def test_seeds_of_draws_do_not_collide() -> None:
    """10,000 draws over seeds, choices and positions have 10,000 seeds."""
    seeds = {draw_seed(s, c, p) for s in range(-5, 5) for c in range(10) for p in range(100)}

    assert (len(seeds), min(seeds) >= 0, max(seeds) < 2**63) == (10_000, True, True)


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [({"top_k": 2}, {1, 2}), ({"top_p": 0.6}, {1}), ({"min_p": 0.3}, {1, 2}), ({"temperature": 0.01}, {1})],
)
def test_filters_leave_out_the_unlikely(rules: dict[str, Any], allowed: set[int]) -> None:
    """top_k, top_p, min_p and a low temperature draw from the likeliest tokens only."""
    assert set(draws(sampler(seed=3, **rules))) == allowed


def test_end_tokens_wait_for_min_tokens() -> None:
    """The end token cannot be chosen before min_tokens tokens are there."""
    one = sampler(temperature=0, min_tokens=2)

    assert [one.choose(LOGITS, choice=0, position=i).token for i in range(3)] == [2, 2, 1]


def test_requested_stop_tokens_wait_too() -> None:
    """What the request stops at is held back like the model's own end tokens."""
    one = sampler(temperature=0, min_tokens=1, stop_token_ids=(2,))

    assert one.choose(LOGITS, choice=0, position=0).token == 3


def test_logprobs_are_those_of_the_model() -> None:
    """Reported log probabilities come before temperature and filters, best first."""
    chosen = sampler(temperature=0.2, top_k=1, logprobs=2).choose(LOGITS, choice=0, position=0)
    expected = torch.log_softmax(LOGITS, dim=0)

    assert chosen.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in chosen.top] == [1, 2]
    assert [value for _, value in chosen.top] == pytest.approx([float(expected[1]), float(expected[2])])


def test_no_report_unless_asked() -> None:
    """Without logprobs nothing is computed for them; with 0 only the chosen token is reported."""
    silent = sampler(temperature=0).choose(LOGITS, choice=0, position=0)
    alone = sampler(temperature=0, logprobs=0).choose(LOGITS, choice=0, position=0)

    assert (silent.logprob, silent.top) == (None, ())
    assert (alone.logprob is not None, alone.top) == (True, ())
