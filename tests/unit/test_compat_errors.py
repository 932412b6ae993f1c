"""OpenAI's error body and headers, for every error that we have."""

import pytest

from appliance.compat import openai_errors
from appliance.errors import (
    ApplianceError,
    BadVector,
    BodyTooLarge,
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    QueueUnavailable,
    RequestTooSlow,
    Unauthorized,
    UnknownPath,
)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidRequest("m", param="input[3]"), "invalid_request_error", "invalid_value"),
        (Unauthorized("m"), "invalid_request_error", "invalid_api_key"),
        (ModelNotFound("m", param="model"), "invalid_request_error", "model_not_found"),
        (UnknownPath("m"), "invalid_request_error", "unknown_url"),
        (MethodNotAllowed("m"), "invalid_request_error", "method_not_allowed"),
        (RequestTooSlow("m"), "invalid_request_error", "request_timeout"),
        (BodyTooLarge("m"), "invalid_request_error", "request_too_large"),
        (Overloaded("m"), "overloaded_error", "overloaded"),
        (QueueUnavailable("m"), "overloaded_error", "queue_unavailable"),
        (DeadlinePassed("m"), "server_error", "deadline_exceeded"),
        (InternalError("m"), "server_error", "internal_error"),
        (BadVector("m"), "server_error", "bad_vector"),
    ],
)
def test_the_body_has_all_four_keys(error: ApplianceError, kind: str, code: str) -> None:
    body = openai_errors.body(error)

    assert body == {"error": {"message": "m", "type": kind, "param": error.param, "code": code}, "message": "m"}


def test_a_long_message_is_cut() -> None:
    body = openai_errors.body(InvalidRequest("x" * 100_000))

    assert body["message"] == "x" * openai_errors.MESSAGE_CHARS_MAX
    assert isinstance(body["error"], dict)
    assert body["error"]["message"] == body["message"]


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [
        (None, b"1", b"1000"),
        (0.0, b"1", b"1000"),
        (0.2, b"1", b"1000"),
        (1.0, b"1", b"1000"),
        (1.2, b"2", b"1200"),
        (59.9991, b"60", b"60000"),
        (1e9, b"60", b"60000"),
        (-3.0, b"1", b"1000"),
    ],
)
def test_a_retry_is_hinted_within_bounds(retry_after_s: float | None, seconds: bytes, milliseconds: bytes) -> None:
    headers = openai_errors.headers(Overloaded("full", retry_after_s=retry_after_s))

    assert headers == [(b"retry-after", seconds), (b"retry-after-ms", milliseconds)]


def test_late_work_is_not_to_be_repeated() -> None:
    assert openai_errors.headers(DeadlinePassed("late")) == [(b"x-should-retry", b"false")]


def test_other_errors_say_nothing_of_retries() -> None:
    assert openai_errors.headers(InvalidRequest("m", retry_after_s=5)) == []
