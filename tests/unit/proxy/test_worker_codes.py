"""Claims about what a client is told of a bundled worker's failure."""

from __future__ import annotations

import pytest

from epdctl.domain import Stage
from epdctl.proxy.retry import error_of_status

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "code", ["consumer_full", "consumer_unavailable", "engine_unavailable", "transfer_failed"]
)
def test_a_known_code_is_passed_on(code: str) -> None:
    """The code that a worker of ours gives tells the user where the cure is, so the message names it."""
    body = b'{"error": {"message": "at 10.0.0.1", "type": "x", "param": null, "code": "%s"}}' % code.encode()

    error = error_of_status(Stage.ENCODE, 503, body, "application/json", None)

    assert error.message == f"the encode instance failed with status 503 ({code})"


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (503, "consumer_full", (503, "consumer_full")),
        (503, "consumer_unavailable", (503, "consumer_unavailable")),
        (503, "engine_unavailable", (503, "engine_unavailable")),
        (503, "storage_unavailable", (503, "storage_unavailable")),
        (507, "storage_full", (503, "storage_full")),
        (503, "shutting_down", (503, "upstream_busy")),
        (500, "encode_failed", (502, "upstream_failed")),
        (502, "transfer_failed", (502, "upstream_failed")),
        (500, "consumer_full", (502, "upstream_failed")),
    ],
)
def test_what_a_worker_lacks_for_the_moment_can_be_retried(
    stage: Stage, status: int, code: str, told: tuple[int, str]
) -> None:
    """What time may cure is a 503 with Retry-After under its cause's code; what is broken is 502."""
    body = b'{"error": {"message": "at 10.0.0.1", "code": "%s"}}' % code.encode()

    for offered, expected in ((None, 1), (7, 7)):
        error = error_of_status(stage, status, body, "application/json", offered)
        assert (error.http_status, error.code) == told
        assert "10.0.0.1" not in error.message
        if told[0] == 503:
            assert error.retry_after_s == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"oops",
        b'{"error": {"code": "/etc/passwd"}}',
        b'{"error": {"code": 500}}',
        b'{"error": 1}',
        b"[]",
    ],
)
def test_other_text_of_an_instance_is_not_shown(body: bytes) -> None:
    """Nothing else of an instance's 5xx body reaches a client."""
    error = error_of_status(Stage.DECODE, 500, body, "application/json", None)

    assert error.message == "the decode instance failed with status 500"
