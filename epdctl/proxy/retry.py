"""What a new attempt can cure, and how many of them the fleet can bear.

Rules of this file:
- Pure. A retry happens only before the client's first byte, and only for what another try may cure: an
  instance that is gone or busy (where another exists), or decode's 500, which is how vLLM says that an
  embedding did not arrive.
- A client's mistake (4xx) is never retried, nor is a deadline that is over.
- Retries may be a fifth of requests: when everything fails, repeating everything makes it worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from epdctl.domain import InstanceUrl, Stage
from epdctl.errors import (
    ConsumerFull,
    ConsumerUnavailable,
    EmbeddingUndelivered,
    EncodeFailed,
    EngineUnavailable,
    EpdError,
    GenerationFailed,
    KvUndelivered,
    ShuttingDown,
    TransferFailed,
    UpstreamFailed,
    UpstreamRefused,
)

RETRY_SHARE = 0.2
_RESERVE = 10.0
_BUSY = frozenset({429, 503})
_WORKER_CODES = frozenset(
    error.code
    for error in (
        ConsumerFull,
        ConsumerUnavailable,
        EmbeddingUndelivered,
        EncodeFailed,
        EngineUnavailable,
        GenerationFailed,
        KvUndelivered,
        ShuttingDown,
        TransferFailed,
    )
)


class FailureKind(StrEnum):
    """What went wrong in a stage; also the `reason` label of retries."""

    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    BUSY = "busy"
    FAILED = "failed"
    PROTOCOL = "protocol"
    REFUSED = "refused"
    TIMEOUT = "timeout"


class StageFailed(Exception):
    """A stage's call ended without a usable answer; `error` is what the client gets if it stays so."""

    def __init__(
        self, stage: Stage, kind: FailureKind, error: EpdError, *, url: InstanceUrl, status: int | None = None
    ) -> None:
        super().__init__(error.message)
        self.stage = stage
        self.kind = kind
        self.error = error
        self.url = url
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a decision about a new attempt depends on besides the failure."""

    attempt: int
    decode_retries: int
    has_other: bool
    has_transfer: bool


def is_worth_a_new_attempt(failure: StageFailed, now: Circumstances) -> bool:
    """Say whether the whole request is worth another attempt from the original body.

    `has_transfer` tells that decode depended on an embedding or a KV cache that may not have arrived.
    """
    if failure.stage is Stage.ENCODE or now.attempt > max(1, now.decode_retries):
        return False
    if failure.kind in (FailureKind.UNREACHABLE, FailureKind.BROKEN, FailureKind.BUSY):
        return now.has_other
    is_undelivered = failure.stage is Stage.DECODE and failure.status == 500 and now.has_transfer
    return is_undelivered and now.attempt <= now.decode_retries


def is_worth_another_encoder(failure: StageFailed, *, has_other: bool) -> bool:
    """Say whether the items of a failed encoder call are worth asking another encoder for."""
    return has_other and failure.kind not in (FailureKind.REFUSED, FailureKind.TIMEOUT)


def kind_of_status(status: int) -> FailureKind:
    """Return what an instance's error status says."""
    if status in _BUSY:
        return FailureKind.BUSY
    return FailureKind.FAILED if status >= 500 else FailureKind.REFUSED


def error_of_status(
    stage: Stage, status: int, body: bytes, content_type: str, retry_after_s: int | None
) -> EpdError:
    """Return what the client is told about an instance's error status: a 4xx as it is, a 5xx as ours."""
    if 400 <= status < 500:
        return UpstreamRefused(status, body, content_type, retry_after_s=retry_after_s)
    cause = f" ({code})" if (code := _known_code(body)) else ""
    message = f"the {stage} instance failed with status {status}{cause}"
    return UpstreamFailed(message, retry_after_s=retry_after_s)


def _known_code(body: bytes) -> str | None:
    """Return the code of an error body when it is one that our workers give; no other text of it is shown."""
    try:
        given = msgspec.json.decode(body, type=_ErrorBody).error.code
    except msgspec.DecodeError:
        return None
    return given if given in _WORKER_CODES else None


class _ErrorFacts(msgspec.Struct, frozen=True):
    code: str | int | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudget:
    """A token bucket: each request puts in a share of a retry, each retry takes one out."""

    tokens: float = _RESERVE

    def earn(self) -> RetryBudget:
        """Return the budget after one more request."""
        return (
            self if self.tokens >= _RESERVE else RetryBudget(tokens=min(_RESERVE, self.tokens + RETRY_SHARE))
        )

    def spend(self) -> RetryBudget | None:
        """Return the budget after one retry, or None when it is used up."""
        return RetryBudget(tokens=self.tokens - 1) if self.tokens >= 1 else None
