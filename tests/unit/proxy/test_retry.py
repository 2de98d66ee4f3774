"""What a new attempt can cure, and the budget for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epdctl.domain import InstanceUrl, Stage
from epdctl.errors import ConsumerFull, ConsumerUnavailable, EpdError, UpstreamFailed, UpstreamRefused
from epdctl.proxy.retry import (
    Circumstances,
    FailureKind,
    RetryBudget,
    StageFailed,
    error_of_status,
    is_worth_a_new_attempt,
    is_worth_another_encoder,
    kind_of_status,
)

pytestmark = pytest.mark.unit

FIRST = Circumstances(attempt=1, decode_retries=1, has_other=True, has_transfer=True)


def failure(stage: Stage, kind: FailureKind, status: int | None = None) -> StageFailed:
    """Return a failure of `stage`."""
    return StageFailed(stage, kind, UpstreamFailed("x"), url=InstanceUrl("http://x"), status=status)


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
@pytest.mark.parametrize("kind", [FailureKind.UNREACHABLE, FailureKind.BROKEN, FailureKind.BUSY])
def test_a_gone_or_busy_instance_is_replaced_where_there_is_another(stage: Stage, kind: FailureKind) -> None:
    """Another instance may do what this one could not; the same one is not asked again."""
    assert is_worth_a_new_attempt(failure(stage, kind), FIRST)
    assert not is_worth_a_new_attempt(failure(stage, kind), replace(FIRST, has_other=False))


@pytest.mark.parametrize("kind", [FailureKind.REFUSED, FailureKind.TIMEOUT, FailureKind.PROTOCOL])
def test_what_no_attempt_cures(kind: FailureKind) -> None:
    """A client's mistake, a deadline that is over, and a wrong answer stay as they are."""
    assert not is_worth_a_new_attempt(failure(Stage.DECODE, kind), FIRST)


def test_decodes_500_asks_for_the_items_again() -> None:
    """An undelivered embedding is decode's 500: a new attempt, with or without another instance."""
    undelivered = failure(Stage.DECODE, FailureKind.FAILED, 500)

    assert is_worth_a_new_attempt(undelivered, replace(FIRST, has_other=False))
    assert not is_worth_a_new_attempt(undelivered, replace(FIRST, has_transfer=False))
    assert not is_worth_a_new_attempt(undelivered, replace(FIRST, decode_retries=0))
    assert not is_worth_a_new_attempt(undelivered, replace(FIRST, attempt=2))
    assert is_worth_a_new_attempt(undelivered, replace(FIRST, attempt=2, decode_retries=2))


def test_prefills_500_is_final() -> None:
    """Hazard 35: a prefill that failed does not make the encoders work again."""
    assert not is_worth_a_new_attempt(failure(Stage.PREFILL, FailureKind.FAILED, 500), FIRST)


def test_an_encoders_failure_is_no_new_attempt() -> None:
    """A failed encoder call costs only its items a second try, inside the attempt."""
    assert not is_worth_a_new_attempt(failure(Stage.ENCODE, FailureKind.UNREACHABLE), FIRST)


@pytest.mark.parametrize("error", [ConsumerFull("x"), ConsumerUnavailable("x")])
def test_a_consumers_failure_is_cured_by_another_consumer(error: EpdError) -> None:
    """An encoder that could not deliver: another consumer where there is one, else another encoder."""
    told = StageFailed(Stage.ENCODE, FailureKind.BUSY, error, url=InstanceUrl("http://x"), status=503)

    assert is_worth_a_new_attempt(told, FIRST)
    assert not is_worth_a_new_attempt(told, replace(FIRST, has_other=False))
    assert not is_worth_a_new_attempt(told, replace(FIRST, attempt=2))
    assert not is_worth_another_encoder(told, has_other=True, has_other_consumer=True)
    assert is_worth_another_encoder(told, has_other=True, has_other_consumer=False)


@pytest.mark.parametrize(
    ("kind", "worth"),
    [
        (FailureKind.UNREACHABLE, True),
        (FailureKind.BROKEN, True),
        (FailureKind.BUSY, True),
        (FailureKind.FAILED, True),
        (FailureKind.PROTOCOL, True),
        (FailureKind.REFUSED, False),
        (FailureKind.TIMEOUT, False),
    ],
)
def test_another_encoder(kind: FailureKind, worth: bool) -> None:
    """Another encoder is asked unless the client's media are at fault or the time is up."""
    failed = failure(Stage.ENCODE, kind)

    for has_other_consumer in (True, False):
        assert (
            is_worth_another_encoder(failed, has_other=True, has_other_consumer=has_other_consumer) is worth
        )
        assert not is_worth_another_encoder(failed, has_other=False, has_other_consumer=has_other_consumer)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FailureKind.REFUSED),
        (404, FailureKind.REFUSED),
        (429, FailureKind.BUSY),
        (500, FailureKind.FAILED),
        (502, FailureKind.FAILED),
        (503, FailureKind.BUSY),
    ],
)
def test_kinds_of_status(status: int, kind: FailureKind) -> None:
    """429 and 503 say busy, other 4xx the client's fault, other 5xx the instance's."""
    assert kind_of_status(status) is kind


def test_a_4xx_keeps_its_status_and_body() -> None:
    """What an instance says to the client reaches the client, with Retry-After."""
    error = error_of_status(Stage.DECODE, 429, b"{}", "application/json", 7)

    assert isinstance(error, UpstreamRefused)
    assert (error.http_status, error.body, error.retry_after_s) == (429, b"{}", 7)


@pytest.mark.parametrize(
    ("status", "retry_after_s", "told"),
    [
        (500, None, (502, "upstream_failed", None)),
        (500, 7, (502, "upstream_failed", 7)),
        (503, None, (502, "upstream_failed", None)),
        (503, 7, (503, "upstream_busy", 7)),
        (507, 7, (502, "upstream_failed", 7)),
    ],
)
def test_a_5xx_becomes_ours(
    status: int, retry_after_s: int | None, told: tuple[int, str, int | None]
) -> None:
    """What an instance says about itself does not reach the client; that it will be back does."""
    error = error_of_status(Stage.ENCODE, status, b"secret", "text/plain", retry_after_s)

    assert (error.http_status, error.code, error.retry_after_s) == told
    assert "secret" not in error.message


def test_the_budget_ends_and_grows_with_requests() -> None:
    """A fleet that fails everything is not asked everything twice."""
    budget: RetryBudget | None = RetryBudget()
    spent = 0
    while budget is not None and (budget := budget.spend()) is not None:
        spent += 1
        left = budget

    assert spent == 10
    for _ in range(5):
        assert left.spend() is None
        left = left.earn()
    assert left.spend() is not None


def test_the_budget_has_a_ceiling() -> None:
    """A quiet day does not save up a storm of retries."""
    budget = RetryBudget()
    for _ in range(10_000):
        budget = budget.earn()

    assert budget == RetryBudget()
