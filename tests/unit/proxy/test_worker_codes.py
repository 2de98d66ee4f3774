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
