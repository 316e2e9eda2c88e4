"""Errors in llama.cpp's shape."""

import json

from frontend.api.llama_cpp.completion import error, status, stream_error
from frontend.errors import BadRequest, ContextLengthExceeded, Internal, NotSupported, Overloaded
from frontend.text.tokenizer import Tokenizer
from tests.frontend.api.harness import response_context


def test_type_and_code_are_llama_cpps() -> None:
    for exc, code, kind in (
        (BadRequest("x"), 400, "invalid_request_error"),
        (Overloaded("x"), 503, "unavailable_error"),
        (Internal("x"), 500, "server_error"),
        (NotSupported("x"), 501, "not_supported_error"),
    ):
        assert json.loads(error(exc, "id")) == {"error": {"code": code, "message": "x", "type": kind}}
        assert status(exc) == code


def test_long_prompt_has_its_length() -> None:
    for at_least, words in ((False, "it has 9 tokens"), (True, "it has at least 9 tokens")):
        exc = ContextLengthExceeded("x", param="prompt", prompt=9, limit=8, at_least=at_least)
        said = json.loads(error(exc, "id"))["error"]
        assert (said["type"], said["n_prompt_tokens"], said["n_ctx"]) == ("exceed_context_size_error", 9, 8)
        assert words in said["message"] and said["param"] == "prompt"


def test_stream_ends_with_it(tokenizer: Tokenizer) -> None:
    event = stream_error(Internal("x"), "id", response_context(tokenizer))
    assert event == b"data: " + error(Internal("x"), "id") + b"\n\n"
