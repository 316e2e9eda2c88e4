"""The fields that API formats share: what they accept, what they refuse, and with which status."""

from typing import Any

import msgspec
import pytest

from frontend.api.anthropic.messages_request import MessageRequest
from frontend.api.llama_cpp import completion
from frontend.api.ollama import chat as ollama_chat
from frontend.api.openai.chat_request import ChatRequest
from frontend.api.openai.completions import CompletionRequest
from frontend.api.openai.responses_request import ResponseRequest
from frontend.api.pooling.embeddings import EmbeddingRequest
from frontend.api.pooling.logprobs import LogprobsRequest
from frontend.api.pooling.rerank import RerankRequest
from frontend.api.sglang.types import GenerateRequest
from frontend.errors import BadRequest, Unprocessable
from frontend.schema.base import RequestModel
from frontend.schema.decoding import convert, decode
from frontend.schema.request_fields import MAX_SALT_CHARS, MAX_STOP_BYTES

LEAST = {"model": "m", "prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(("field", "value"), [
    ("seed", -(1 << 63)), ("seed", (1 << 64) - 1), ("priority", -(1 << 31)), ("top_k", 8.0), ("temperature", 0),
    ("logit_bias", {"5": 1}), ("stop", "x"), ("stop", ["x", "y"]), ("user", {"any": 1}), ("skip_special_tokens", True),
    ("allowed_token_ids", None), ("length_penalty", 1), ("use_beam_search", False),
])  # fmt: skip
def test_shared_field_accepts_its_values(field: str, value: Any) -> None:
    convert({**LEAST, field: value}, CompletionRequest)


@pytest.mark.parametrize(("field", "value", "code"), [
    ("seed", 1 << 64, "out_of_range"), ("top_p", -0.1, "out_of_range"), ("min_p", 1.1, "out_of_range"),
    ("repetition_penalty", 0, "out_of_range"), ("logit_bias", {"a": 1}, "out_of_range"), ("stop", [""], "out_of_range"),
    ("stream_reasoning", False, "unsupported_field"), ("allowed_token_ids", [-1], "out_of_range"),
    ("nonsense", 1, "unknown_field"),
])  # fmt: skip
def test_shared_field_out_of_range_or_unsupported_is_unprocessable(field: str, value: Any, code: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        convert({**LEAST, field: value}, CompletionRequest)
    wrong = f"{field}[0]" if isinstance(value, list) else field
    assert (refused.value.param, refused.value.code, refused.value.status) == (wrong, code, 422)


@pytest.mark.parametrize(("field", "value"), [("seed", "1"), ("top_k", 8.5), ("stop", 1), ("logit_bias", [1])])
def test_shared_field_of_a_wrong_type_is_a_bad_request(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        convert({**LEAST, field: value}, CompletionRequest)
    assert (refused.value.param, refused.value.code, refused.value.status) == (field, "wrong_type", 400)


def test_stop_of_one_text_is_the_same_as_a_list_of_it() -> None:
    assert convert({**LEAST, "stop": "x"}, CompletionRequest).stops == ("x",)
    assert convert(LEAST, CompletionRequest).stops == ()


USER = [{"role": "user", "content": "a"}]
STOPPING: dict[str, tuple[type[RequestModel], str, dict[str, Any]]] = {
    "completions": (CompletionRequest, "stop", {"prompt": "a"}),
    "chat": (ChatRequest, "stop", {"messages": USER}),
    "responses": (ResponseRequest, "stop", {"input": "a"}),
    "messages": (MessageRequest, "stop_sequences", {"messages": USER, "max_tokens": 1}),
    "ollama chat": (ollama_chat.CHAT.REQUEST, "options.stop", {"model": "m", "messages": USER}),
    "ollama generate": (ollama_chat.GENERATE.REQUEST, "options.stop", {"model": "m", "prompt": "a"}),
    "llama.cpp completion": (completion.COMPLETION.REQUEST, "stop", {"prompt": "a"}),
    "llama.cpp infill": (completion.INFILL.REQUEST, "stop", {"input_prefix": "a", "input_suffix": "b"}),
    "sglang generate": (GenerateRequest, "sampling_params.stop", {"text": "a"}),
}


def stopping(form: str, stops: list[str]) -> Any:
    """Decodes a request with these stop strings, as JSON and as a Python caller's options."""
    kind, field, body = STOPPING[form]
    value: Any = stops
    for name in reversed(field.split(".")):
        value = {name: value}
    assert decode(msgspec.json.encode({**body, **value}), kind) == convert({**body, **value}, kind)
    return convert({**body, **value}, kind)


@pytest.mark.parametrize("form", STOPPING)
def test_stop_strings_up_to_the_limit_in_all_are_accepted(form: str) -> None:
    stopping(form, ["é" * (MAX_STOP_BYTES // 2 - 40), *["xy"] * 40])


@pytest.mark.parametrize("form", STOPPING)
@pytest.mark.parametrize("stops", [["x" * (MAX_STOP_BYTES + 1)], ["é" * (MAX_STOP_BYTES // 2 - 39), *["xy"] * 40]])
def test_stop_strings_longer_than_the_limit_in_all_are_refused_by_name(form: str, stops: list[str]) -> None:
    with pytest.raises(Unprocessable, match=f"at most {MAX_STOP_BYTES} bytes") as refused:
        stopping(form, stops)
    assert (refused.value.param, refused.value.code) == (STOPPING[form][1], "out_of_range")


@pytest.mark.parametrize(("kind", "body"), [
    (CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": USER}), (ResponseRequest, {"input": "a"}),
    (MessageRequest, {"messages": USER, "max_tokens": 1}), (EmbeddingRequest, {"input": "a"}),
    (LogprobsRequest, {"prompt": "a"}), (RerankRequest, {"query": "a", "documents": ["a"]}),
])  # fmt: skip
def test_cache_salt_longer_than_the_limit_is_refused_by_name(kind: type[RequestModel], body: dict[str, Any]) -> None:
    convert({**body, "cache_salt": "é" * MAX_SALT_CHARS}, kind)
    with pytest.raises(Unprocessable, match=f"`cache_salt` may have at most {MAX_SALT_CHARS} characters") as refused:
        convert({**body, "cache_salt": "x" * (MAX_SALT_CHARS + 1)}, kind)
    assert refused.value.param == "cache_salt"


def test_bad_word_longer_than_the_limit_is_refused_by_name() -> None:
    convert({**LEAST, "bad_words": ["x" * 128]}, CompletionRequest)
    with pytest.raises(Unprocessable, match=r"`bad_words\[1\]` may have at most 128 characters"):
        convert({**LEAST, "bad_words": ["x", "x" * 129]}, CompletionRequest)
