"""What a new attempt can cure, and how many of them the fleet can bear.

Rules of this file:
- Pure. A retry happens only before the client's first byte, and only for what another try may cure: an
  instance that is gone or busy (where another exists), or decode's 500, which is how vLLM says that an
  embedding did not arrive.
- An encoder's failure that names the consumer is the consumer's: a whole new attempt with another one may
  cure it, another encoder hardly.
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
    StorageFull,
    StorageUnavailable,
    TransferFailed,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamRefused,
)

RETRY_SHARE = 0.2
_RESERVE = 10.0
_BUSY = frozenset({429, 503})
_INSUFFICIENT_STORAGE = 507
_RETRY_AFTER_S = 1
_FOR_NOW: tuple[type[EpdError], ...] = (
    ConsumerFull,
    ConsumerUnavailable,
    EngineUnavailable,
    StorageFull,
    StorageUnavailable,
)
_PASSING = {error.code: error for error in _FOR_NOW}
"""What a worker of ours lacks for the moment; the client is told under the same code, as a 503."""

_BROKEN: tuple[type[EpdError], ...] = (
    EmbeddingUndelivered,
    EncodeFailed,
    GenerationFailed,
    KvUndelivered,
    ShuttingDown,
    TransferFailed,
)
_WORKER_CODES = frozenset(error.code for error in (*_FOR_NOW, *_BROKEN))


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

    @property
    def is_of_consumer(self) -> bool:
        """Whether an encoder said that the consumer it was to push to has no room, or does not answer."""
        return self.stage is Stage.ENCODE and isinstance(self.error, ConsumerFull | ConsumerUnavailable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a decision about a new attempt depends on besides the failure.

    `has_other` tells that another instance could stand in for the one that is to blame.
    """

    attempt: int
    decode_retries: int
    has_other: bool
    has_transfer: bool


def is_worth_a_new_attempt(failure: StageFailed, now: Circumstances) -> bool:
    """Say whether the whole request is worth another attempt from the original body.

    `has_transfer` tells that decode depended on an embedding or a KV cache that may not have arrived.
    """
    if now.attempt > max(1, now.decode_retries):
        return False
    if failure.stage is Stage.ENCODE:
        return failure.is_of_consumer and now.has_other
    if failure.kind in (FailureKind.UNREACHABLE, FailureKind.BROKEN, FailureKind.BUSY):
        return now.has_other
    is_undelivered = failure.stage is Stage.DECODE and failure.status == 500 and now.has_transfer
    return is_undelivered and now.attempt <= now.decode_retries


def is_worth_another_encoder(failure: StageFailed, *, has_other: bool, has_other_consumer: bool) -> bool:
    """Say whether the items of a failed encoder call are worth asking another encoder for.

    Not when the consumer is to blame and another one can take the whole request.
    """
    if failure.is_of_consumer and has_other_consumer:
        return False
    return has_other and failure.kind not in (FailureKind.REFUSED, FailureKind.TIMEOUT)


def kind_of_status(status: int) -> FailureKind:
    """Return what an instance's error status says."""
    if status in _BUSY:
        return FailureKind.BUSY
    return FailureKind.FAILED if status >= 500 else FailureKind.REFUSED


def error_of_status(
    stage: Stage, status: int, body: bytes, content_type: str, retry_after_s: int | None
) -> EpdError:
    """Return what the client is told about an instance's error status.

    A 4xx passes as it is. What says that trying later helps stays a 503 with Retry-After, under the code of
    our worker when it gave one; any other 5xx is a failure of the instance.
    """
    if 400 <= status < 500:
        return UpstreamRefused(status, body, content_type, retry_after_s=retry_after_s)
    code = _known_code(body)
    cause = f" ({code})" if code else ""
    message = f"the {stage} instance failed with status {status}{cause}"
    kind = _kind_of_5xx(status, code, retry_after_s)
    if kind is UpstreamFailed:
        return UpstreamFailed(message, retry_after_s=retry_after_s)
    error = kind(message, retry_after_s=_RETRY_AFTER_S if retry_after_s is None else retry_after_s)
    error.http_status = 503  # type: ignore[misc]
    return error


def _kind_of_5xx(status: int, code: str | None, retry_after_s: int | None) -> type[EpdError]:
    if status in (503, _INSUFFICIENT_STORAGE) and code in _PASSING:
        return _PASSING[code]
    is_for_now = status == 503 and (retry_after_s is not None or code == ShuttingDown.code)
    return UpstreamBusy if is_for_now else UpstreamFailed


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
