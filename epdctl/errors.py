"""Every failure epdctl can name, with the HTTP status and the code it becomes.

Rules of this file: a class per failure; facts are attributes; messages are safe to show to a client (no
exception text of a library, no media, no key, no query string, no host of an upstream). `http_errors` is the
only place that turns these into HTTP. The table in `docs/behaviour.md` is tested against this file.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Fault(StrEnum):
    """Whose fault a failure is."""

    CLIENT = "client"
    US = "us"
    UPSTREAM = "upstream"


class EpdError(Exception):
    """Base of all failures; never raised itself."""

    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    type: ClassVar[str] = "server_error"
    fault: ClassVar[Fault] = Fault.US

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        if type(self) is EpdError:
            raise TypeError("EpdError is a family, raise one of its members")
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(EpdError):
    """The request is malformed or breaks a rule; `param` names the field."""

    http_status, code, type, fault = 400, "invalid_request", "invalid_request_error", Fault.CLIENT


class UnsupportedMedia(EpdError):
    """A media part is of a kind, or in a shape, that is not served."""

    http_status, code, type, fault = 400, "unsupported_media", "invalid_request_error", Fault.CLIENT


class MediaUnavailable(EpdError):
    """Media could not be fetched, decoded, or is larger than allowed."""

    http_status, code, type, fault = 400, "media_unavailable", "invalid_request_error", Fault.CLIENT


class NotAuthenticated(EpdError):
    """The data plane wants an API key and did not get a right one."""

    http_status, code, type, fault = 401, "invalid_api_key", "authentication_error", Fault.CLIENT


class NotAuthorised(EpdError):
    """The admin API wants `X-API-Key` and did not get the right one, or has none configured."""

    http_status, code, type, fault = 403, "forbidden", "permission_error", Fault.CLIENT


class UnknownModel(EpdError):
    """Every stage has a ready instance, and none of them lists the model."""

    http_status, code, type, fault = 404, "model_not_found", "invalid_request_error", Fault.CLIENT


class UnknownInstance(EpdError):
    """The admin API was asked about a URL that is not registered."""

    http_status, code, type, fault = 404, "unknown_instance", "invalid_request_error", Fault.CLIENT


class MethodNotAllowed(EpdError):
    """The endpoint exists and takes other methods, which `Allow` lists."""

    http_status, code, type, fault = 405, "method_not_allowed", "invalid_request_error", Fault.CLIENT
    allowed: tuple[str, ...] = ()


class TopologyConflict(EpdError):
    """The role does not fit what is registered already."""

    http_status, code, type, fault = 409, "topology_conflict", "invalid_request_error", Fault.CLIENT


class RoleChange(EpdError):
    """The URL is registered with another role; remove it first."""

    http_status, code, type, fault = 409, "role_change", "invalid_request_error", Fault.CLIENT


class StaticInstance(EpdError):
    """The instance comes from the command line and cannot be changed over the API."""

    http_status, code, type, fault = 409, "static_instance", "invalid_request_error", Fault.CLIENT


class BodyTooLarge(EpdError):
    """The body is larger than `--max-body-bytes`."""

    http_status, code, type, fault = 413, "body_too_large", "invalid_request_error", Fault.CLIENT


class UnsupportedEncoding(EpdError):
    """The body has a content coding that is not taken off here; comes with Accept-Encoding."""

    http_status, code, type, fault = 415, "unsupported_encoding", "invalid_request_error", Fault.CLIENT


class SchemaViolation(EpdError):
    """An admin body breaks its schema: unknown field, wrong type, bad URL, address count against dp_size."""

    http_status, code, type, fault = 422, "schema_violation", "invalid_request_error", Fault.CLIENT


class Overloaded(EpdError):
    """The queue is full, or the wait for a slot was over; comes with Retry-After."""

    http_status, code, type, fault = 429, "overloaded", "rate_limit_error", Fault.US


class InternalFailure(EpdError):
    """Something of ours failed in a way that has no name; the log has its traceback."""

    http_status, code, type, fault = 500, "internal", "server_error", Fault.US


class EncodeFailed(EpdError):
    """The vision tower failed on an item."""

    http_status, code, type, fault = 500, "encode_failed", "server_error", Fault.US


class GenerationFailed(EpdError):
    """The language engine failed on a request."""

    http_status, code, type, fault = 500, "generation_failed", "server_error", Fault.US


class EmbeddingUndelivered(EpdError):
    """An embedding that the request needs did not arrive whole; another attempt may cure it.

    500 because that is what a vLLM consumer answers, and what proxies encode again for.
    """

    http_status, code, type, fault = 500, "embedding_undelivered", "server_error", Fault.UPSTREAM


class KvUndelivered(EpdError):
    """The KV of a prompt did not get from prefill to decode; another attempt may cure it.

    500 for the same reason as `EmbeddingUndelivered`.
    """

    http_status, code, type, fault = 500, "kv_undelivered", "server_error", Fault.UPSTREAM


class UnsupportedEndpoint(EpdError):
    """The path is not served on this topology."""

    http_status, code, type, fault = 501, "unsupported_endpoint", "invalid_request_error", Fault.CLIENT


class UpstreamUnreachable(EpdError):
    """An instance refused the connection or dropped it before its first byte."""

    http_status, code, type, fault = 502, "upstream_unreachable", "upstream_error", Fault.UPSTREAM


class UpstreamProtocol(EpdError):
    """An instance answered something that its protocol does not allow."""

    http_status, code, type, fault = 502, "upstream_protocol", "upstream_error", Fault.UPSTREAM


class UpstreamFailed(EpdError):
    """An instance answered 5xx."""

    http_status, code, type, fault = 502, "upstream_failed", "upstream_error", Fault.UPSTREAM


class TransferFailed(EpdError):
    """An embedding or KV transfer did not arrive whole."""

    http_status, code, type, fault = 502, "transfer_failed", "upstream_error", Fault.UPSTREAM


class NoInstance(EpdError):
    """No ready instance serves a stage; comes with Retry-After. The code names the role."""

    http_status, type, fault = 503, "service_unavailable", Fault.US
    code = "no_instance"

    def __init__(self, role: str, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.role = role
        # An instance attribute on purpose: the code is part of the interface and depends on the role.
        self.code = f"no_{role}_instance"  # type: ignore[misc]


class ShuttingDown(EpdError):
    """This process is draining and takes no new work."""

    http_status, code, type, fault = 503, "shutting_down", "service_unavailable", Fault.US


class UpstreamBusy(EpdError):
    """An instance says 503 and none stands in for it; comes with Retry-After."""

    http_status, code, type, fault = 503, "upstream_busy", "upstream_error", Fault.UPSTREAM


class EngineUnavailable(EpdError):
    """A bundled worker's engine process is dead or not ready yet; comes with Retry-After."""

    http_status, code, type, fault = 503, "engine_unavailable", "service_unavailable", Fault.US


class ConsumerUnavailable(EpdError):
    """An EC consumer did not answer on its control address within the deadline."""

    http_status, code, type, fault = 503, "consumer_unavailable", "upstream_error", Fault.UPSTREAM


class ConsumerFull(EpdError):
    """An EC consumer refused a reservation: its arena has no space."""

    http_status, code, type, fault = 503, "consumer_full", "upstream_error", Fault.UPSTREAM


class StorageUnavailable(EpdError):
    """The shared folder for embeddings is gone, unwritable, or failing."""

    http_status, code, type, fault = 503, "storage_unavailable", "upstream_error", Fault.UPSTREAM


class StorageFull(EpdError):
    """The shared folder for embeddings has no space, or a quota or limit was reached."""

    http_status, code, type, fault = 507, "storage_full", "upstream_error", Fault.UPSTREAM


class UpstreamTimeout(EpdError):
    """An instance did not answer within its stage's deadline."""

    http_status, code, type, fault = 504, "upstream_timeout", "upstream_error", Fault.UPSTREAM


class UpstreamRefused(EpdError):
    """An instance answered 4xx: its status and body are passed through as they are."""

    http_status, code, type, fault = 400, "upstream_refused", "invalid_request_error", Fault.UPSTREAM

    def __init__(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(f"an instance refused the request with status {status}", retry_after_s=retry_after_s)
        self.http_status = status  # type: ignore[misc]
        self.body = body
        self.content_type = content_type


def envelope(error: EpdError) -> dict[str, object]:
    """Return the OpenAI-shaped error object of `error`."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
