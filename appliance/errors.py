"""The error tree: every operating error has one code, one HTTP status, and says whether a retry can help.

    ApplianceError
    ├── InvalidRequest 400            the client must change the request
    │   ├── MalformedBody             not JSON, or not the shape the endpoint takes
    │   ├── UnsupportedParameter      a known field that changes the answer and is not served
    │   ├── TooLong                   more tokens than the model takes
    │   └── FingerprintMismatch       the vectors are of another space than the client expects
    ├── Unauthorized 401
    ├── ModelNotFound 404, UnknownPath 404, MethodNotAllowed 405, RequestTooSlow 408, BodyTooLarge 413
    ├── RateLimited 429               retryable, with the seconds until the key may go on
    ├── Overloaded 503                retryable, with a hint of when
    │   ├── QueueUnavailable          NATS is away
    │   └── ModelLoading              the model is not resident yet
    ├── DeadlinePassed 504            the work was dropped before it cost device time
    ├── ClientGone 499                nobody is listening any more
    ├── InternalError 500
    │   ├── EngineFailed              the engine reported a fault or died, and a retry on our side did not help
    │   ├── BadVector                 a non-finite, zero or misshapen result: never sent as an answer
    │   └── Undeliverable             every delivery failed; the job lies in the dead-letter stream
    └── StartupError                  configuration or environment; stops start-up, never reaches a client

A code names exactly one class, so that an error can cross a process boundary as plain data (`jobs.Failed`) and be
restored on the other side. Messages say what was wrong, the value, the limit and the next step.
"""

from typing import ClassVar


class ApplianceError(Exception):
    """An operating error: expected, tested, and answered. Bugs are `assert`s and crash the process."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @staticmethod
    def restore(code: str, message: str, *, param: str | None, retry_after_s: float | None) -> "ApplianceError":
        """Rebuild the error that `code` names; an unknown code (a newer peer) becomes an `InternalError`."""
        kind = _KINDS.get(code, InternalError)
        return kind(message, param=param, retry_after_s=retry_after_s)


class InvalidRequest(ApplianceError):
    """The request is well-formed but says something that cannot be served."""

    code = "invalid_value"
    status = 400


class MalformedBody(InvalidRequest):
    """The body is not JSON, or not of the shape the endpoint takes."""

    code = "invalid_json"


class UnsupportedParameter(InvalidRequest):
    """A known field that would change the answer and is not served here."""

    code = "unsupported_parameter"


class TooLong(InvalidRequest):
    """One input has more tokens than the model takes."""

    code = "context_length_exceeded"


class FingerprintMismatch(InvalidRequest):
    """The client expects vectors of another space, with which these cannot be compared."""

    code = "fingerprint_mismatch"


class Unauthorized(ApplianceError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    status = 401


class ModelNotFound(ApplianceError):
    """No served model or alias has this name."""

    code = "model_not_found"
    status = 404


class UnknownPath(ApplianceError):
    """No endpoint has this path."""

    code = "unknown_url"
    status = 404


class RequestTooSlow(ApplianceError):
    """The request did not arrive in time."""

    code = "request_timeout"
    status = 408


class MethodNotAllowed(ApplianceError):
    """The endpoint exists but takes another method."""

    code = "method_not_allowed"
    status = 405


class BodyTooLarge(ApplianceError):
    """The request body, or one input of it, is over the limit."""

    code = "request_too_large"
    status = 413


class ClientGone(ApplianceError):
    """The client closed the connection before its answer was ready."""

    code = "client_closed_request"
    status = 499


class InternalError(ApplianceError):
    """Something failed on our side."""


class EngineFailed(InternalError):
    """The engine reported a fault or died, and isolating and retrying the work did not help."""

    code = "engine_failed"


class BadVector(InternalError):
    """A result was non-finite, zero, misshapen or miscounted; it is never sent as an answer."""

    code = "bad_vector"


class Undeliverable(InternalError):
    """Every delivery of the job failed; it lies in the dead-letter stream with this reason."""

    code = "undeliverable"


class RateLimited(ApplianceError):
    """The key has sent more requests than it may."""

    code = "rate_limit_exceeded"
    status = 429
    is_retryable = True


class Overloaded(ApplianceError):
    """The queue or the gateway is full."""

    code = "overloaded"
    status = 503
    is_retryable = True


class QueueUnavailable(Overloaded):
    """NATS cannot be reached at present."""

    code = "queue_unavailable"


class ModelLoading(Overloaded):
    """The model is served here but not resident yet."""

    code = "model_loading"


class DeadlinePassed(ApplianceError):
    """The deadline passed before the work was done; it was dropped before it could cost device time."""

    code = "deadline_exceeded"
    status = 504


class StartupError(ApplianceError):
    """A setting, a file or the environment is wrong; the message names it, the value and what is allowed."""

    code = "startup_error"


def _tree(kind: type[ApplianceError]) -> list[type[ApplianceError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _tree(child))]


# `InternalError` shares the root's code on purpose: it is the root, made concrete.
_KINDS = {kind.code: kind for kind in _tree(ApplianceError) if kind is not ApplianceError}
