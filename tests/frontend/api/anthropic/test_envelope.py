"""Errors in Anthropic's format."""

import pytest

from frontend.api.anthropic import messages
from frontend.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    SluiceError,
    TooLarge,
    Unauthorized,
    Unprocessable,
)
from frontend.text.tokenizer import Tokenizer
from tests.frontend.api.harness import response_context

ERRORS = [
    (BadRequest("x"), "invalid_request_error"), (Unauthorized("x"), "authentication_error"),
    (NotFound("x"), "not_found_error"), (MethodNotAllowed("x"), "not_found_error"),
    (TooLarge("x"), "request_too_large"), (Unprocessable("x"), "invalid_request_error"),
    (Unprocessable("x", code="model_not_found"), "not_found_error"), (Overloaded("x"), "overloaded_error"),
    (Internal("x"), "api_error"), (SluiceError("x"), "api_error"), (DeadlineExceeded("x"), "timeout_error"),
]  # fmt: skip


@pytest.mark.parametrize(("exc", "kind"), ERRORS)
def test_error_type_of_every_error(tokenizer: Tokenizer, exc: SluiceError, kind: str) -> None:
    said = f'{{"type":"error","error":{{"type":"{kind}","message":"x"}},"request_id":"r"}}'.encode()
    assert messages.error(exc, "r") == said
    assert messages.stream_error(exc, "r", response_context(tokenizer)) == b"event: error\ndata: " + said + b"\n\n"
