"""When a shared store that failed is tried again."""

from __future__ import annotations

import pytest

from epdctl.worker.encode.breaker import Breaker

pytestmark = pytest.mark.unit


class TestBreaker:
    """When it is tried again."""

    def test_pauses_double_up_to_the_longest(self) -> None:
        """Each failed try doubles the pause; a success starts anew."""
        breaker = Breaker(first_s=1, most_s=5)
        breaker.succeeded()

        pauses = []
        for _ in range(5):
            breaker.failed(100.0)
            pauses.append(breaker.retry_at - 100.0)
        breaker.succeeded()
        breaker.failed(200.0)

        assert pauses == [1, 2, 4, 5, 5]
        assert breaker.retry_at == 201.0

    def test_only_changes_are_told(self) -> None:
        """Going down and coming up are told once each."""
        breaker = Breaker(first_s=1, most_s=5)

        told = [breaker.succeeded(), breaker.succeeded(), breaker.failed(0), breaker.failed(0)]

        assert told == [True, False, True, False]
        assert breaker.succeeded()
