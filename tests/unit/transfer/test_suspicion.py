"""A consumer that did not answer: asked once a second, believed at its first answer."""

from __future__ import annotations

import pytest

from epdctl.worker.transfer.suspicion import Suspicion

pytestmark = pytest.mark.unit


def test_a_consumer_without_a_silence_is_always_asked() -> None:
    """Nothing is held back from a consumer that has not failed to answer."""
    suspicion = Suspicion()

    assert [suspicion.ask(0.0), suspicion.ask(0.0), suspicion.is_suspect(0.0)] == [True, True, False]


def test_a_silent_consumer_is_asked_once_a_second() -> None:
    """Of questions every tenth of a second, 1 in 10 is let through while the silence goes on."""
    suspicion = Suspicion()
    let_through = []
    for tenth in range(1, 40):
        suspicion.silent(tenth / 10 - 0.05)
        if suspicion.ask(tenth / 10):
            let_through.append(tenth)

    assert let_through == [11, 21, 31]


def test_looking_takes_no_probe() -> None:
    """`is_held` may be asked at will: only `ask` takes the probe of the second."""
    suspicion = Suspicion()
    suspicion.silent(0.0)

    assert [suspicion.is_held(0.9), suspicion.is_held(1.0), suspicion.is_held(1.0)] == [True, False, False]
    assert [suspicion.ask(1.0), suspicion.ask(1.0), suspicion.is_held(1.0)] == [True, False, True]


def test_the_first_answer_clears_it() -> None:
    """After one answer everything is let through again."""
    suspicion = Suspicion()
    suspicion.silent(0.0)
    suspicion.heard()

    assert not suspicion.is_suspect(0.1)
    assert suspicion.ask(0.1)
    assert suspicion.ask(0.1)


def test_old_silence_is_forgotten() -> None:
    """A burst long after the last silence is not failed for it, and a new silence counts anew."""
    suspicion = Suspicion()
    suspicion.silent(0.0)

    assert all(suspicion.ask(6.0) for _ in range(10))

    suspicion.silent(7.0)
    assert not suspicion.ask(7.5)
