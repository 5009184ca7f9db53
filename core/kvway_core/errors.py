"""One tree of errors, and one mapping from it to HTTP status and OpenAI error code.

    KvwayError
    |- ConfigError            start-up only; lists every problem at once; exit code 2
    |- RequestError           the client's request is at fault; never retried
    |  |- InvalidRequest 400, ContextLengthExceeded 400, ModelNotFound 404, NotFound 404
    |  |- MethodNotAllowed 405, RequestTimeout 408, PinQuotaExceeded 409, PayloadTooLarge 413
    |  `- UnsupportedMediaType 415
    |- ClientDisconnected     499: nobody is left to answer; logged, never sent
    |- DeadlineExceeded       504
    |- ReplicaError           a replica is at fault
    |  |- ConnectFailed       502: nothing was sent, so it may be tried elsewhere
    |  |- ReplicaRejected     503: the replica refused before working, so it may be tried elsewhere
    |  |- ReplicaFailed       502: it worked on the request and gave an error
    |  |- ReplicaLost         502: it went out of service before it answered
    |  |- FirstTokenTimeout   504: it took the request and said nothing for too long
    |  |- TokenTimeout        504: it fell silent in the middle of its answer
    |  |- StreamBroken        502: the answer stopped in the middle
    |  `- ProtocolError       502: the peer said something that cannot be understood
    |- NoReplicaAvailable 503, Overloaded 503, QueueTimeout 503, ShuttingDown 503
    |- RequestCrashedReplica 500
    |- EngineFailed 500
    |- CacheError 500         inside a worker
    |  |- OutOfBlocks
    |  `- InvariantViolated
    `- InternalError 500      whatever was not foreseen

A message says what was wrong, the value or limit, and the fix, in one sentence. It never carries
prompt text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

INVALID_REQUEST_ERROR = "invalid_request_error"
SERVER_ERROR = "server_error"


class KvwayError(Exception):
    """The root: every error that kvway raises on purpose is one of these.

    Attributes:
        code: Stable machine-readable name, the `code` of the OpenAI error.
        http_status: Status the error is answered with.
        error_type: The `type` of the OpenAI error: whose fault it is.
        retryable: True when the same request may be tried at another replica.
        message: One sentence for a person.
        param: The request field at fault, if one is.
    """

    code: str = "internal_error"
    http_status: int = 500
    error_type: ClassVar[str] = SERVER_ERROR
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(KvwayError):
    """The program cannot start as configured. Carries every problem found, not only the first."""

    code = "config_error"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems: tuple[str, ...] = tuple(problems)


class RequestError(KvwayError):
    """The client's request is at fault; trying it again unchanged cannot help."""

    code = "invalid_request"
    http_status = 400
    error_type = INVALID_REQUEST_ERROR


class InvalidRequest(RequestError):
    """The request is malformed, out of range or asks for what is not supported."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        if code is not None:
            self.code = code


class ContextLengthExceeded(RequestError):
    """Prompt and requested output do not fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    """The named model is not served here."""

    code = "model_not_found"
    http_status = 404


class NotFound(RequestError):
    """There is no such route or record."""

    code = "not_found"
    http_status = 404


class MethodNotAllowed(RequestError):
    """The route exists but not for this method."""

    code = "method_not_allowed"
    http_status = 405


class RequestTimeout(RequestError):
    """The request body did not arrive in time."""

    code = "request_timeout"
    http_status = 408


class PinQuotaExceeded(RequestError):
    """More prefixes, or longer ones, are to be pinned than the worker keeps room for."""

    code = "pin_quota_exceeded"
    http_status = 409


class PayloadTooLarge(RequestError):
    """The request body is over the limit."""

    code = "payload_too_large"
    http_status = 413


class UnsupportedMediaType(RequestError):
    """The body is encoded in a way that is not accepted."""

    code = "unsupported_media_type"
    http_status = 415


class ClientDisconnected(KvwayError):
    """The client left; the answer has nowhere to go."""

    code = "client_disconnected"
    http_status = 499
    error_type = INVALID_REQUEST_ERROR


class DeadlineExceeded(KvwayError):
    """The request did not finish within its deadline."""

    code = "deadline_exceeded"
    http_status = 504


class ReplicaError(KvwayError):
    """A replica is at fault."""

    code = "replica_error"
    http_status = 502


class ConnectFailed(ReplicaError):
    """No connection to the replica: nothing was sent."""

    code = "connect_failed"
    retryable = True


class ReplicaRejected(ReplicaError):
    """The replica refused the request before doing any work.

    Attributes:
        status: What it answered.
        retry_after_s: When it may be asked again; None if it does not say.
    """

    code = "replica_rejected"
    http_status = 503
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 503,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.retry_after_s = retry_after_s


class ReplicaFailed(ReplicaError):
    """The replica worked on the request and gave an error.

    Attributes:
        status: The status that it answered or named; None if it named none.
    """

    code = "replica_failed"

    def __init__(
        self, message: str, *, param: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.status = status

    @property
    def is_clients(self) -> bool:
        """Whether the replica says that the request is at fault."""
        return self.status is not None and 400 <= self.status < 500


class ReplicaLost(ReplicaError):
    """The replica went out of service while a request waited for it."""

    code = "replica_lost"


class FirstTokenTimeout(ReplicaError):
    """The replica took the request and said nothing for too long: it may still be at work."""

    code = "first_token_timeout"
    http_status = 504


class TokenTimeout(ReplicaError):
    """The replica's answer stopped coming, though the connection is there."""

    code = "token_timeout"
    http_status = 504


class StreamBroken(ReplicaError):
    """The replica's answer stopped before its end."""

    code = "stream_broken"


class ProtocolError(ReplicaError):
    """A peer sent bytes that do not follow the protocol."""

    code = "protocol_error"


class NoReplicaAvailable(KvwayError):
    """No replica can take the request now."""

    code = "no_replica_available"
    http_status = 503


class Overloaded(KvwayError):
    """More work is waiting than may wait; come back later."""

    code = "overloaded"
    http_status = 503


class QueueTimeout(KvwayError):
    """The request waited for a replica with room for as long as it may."""

    code = "queue_timeout"
    http_status = 503


class ShuttingDown(KvwayError):
    """The process is stopping and takes nothing new."""

    code = "shutting_down"
    http_status = 503


class RequestCrashedReplica(KvwayError):
    """Replicas were lost while they worked on this request; it is kept away from the others."""

    code = "request_crashed_replica"


class EngineFailed(KvwayError):
    """The engine raised during a step."""

    code = "engine_failed"


class CacheError(KvwayError):
    """The block pool cannot do what was asked."""

    code = "cache_error"


class OutOfBlocks(CacheError):
    """Not enough free blocks."""

    code = "out_of_blocks"


class InvariantViolated(CacheError):
    """The pool's books do not add up: a bug in kvway."""

    code = "invariant_violated"


class InternalError(KvwayError):
    """Something unforeseen; the message is fixed so that nothing of the request leaks into it."""

    def __init__(self) -> None:
        super().__init__("The server had an internal error; its log has the details.")


def error_body(exc: KvwayError) -> bytes:
    """Returns the OpenAI form of an error: `{"error": {message, type, param, code}}` as JSON.

    Everything outside ASCII, every quote and every line break is escaped, so the body fits on one
    line of a log or of an event stream whatever the message holds.
    """
    error = {
        "message": exc.message,
        "type": exc.error_type,
        "param": exc.param,
        "code": exc.code,
    }
    return json.dumps({"error": error}, separators=(",", ":")).encode("ascii")
