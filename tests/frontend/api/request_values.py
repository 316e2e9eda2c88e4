"""Every field of every request type, and values near the bounds of what fields accept."""

import math
from typing import Any

from hypothesis import strategies as st

from frontend.api.llama_cpp.server import LlamaCppEmbeddingRequest
from frontend.api.ollama.models import ShowRequest
from frontend.api.pooling.cohere import CohereEmbedRequest
from frontend.api.pooling.decisions import DecisionRequest
from frontend.api.pooling.generative_scoring import GenerativeScoringRequest
from frontend.api.pooling.rerank import RerankRequest, ScoreRequest
from frontend.api.pooling.systemone import SystemOneRequest
from frontend.api.pooling.tei import TeiSimilarityRequest
from frontend.api.sglang.types import GenerateRequest
from frontend.routes.openapi_paths import REQUESTS
from frontend.schema.base import RequestModel, fields_of
from frontend.schema.json_schema import request_schema

RECEIPT = {
    "version": 1, "fingerprint": "", "model": "a", "route": "/v1/completions", "index": 0, "prompt_sha256": "",
    "sampling": {"seed": 1}, "output_ids": [1], "finish_reason": "eos", "created": 1,
}  # fmt: skip
OWN: dict[type[RequestModel], dict[str, Any]] = {  # what requests need beside REQUIRED, or instead
    ShowRequest: {"model": "m"},
    TeiSimilarityRequest: {"inputs": {"source_sentence": "a", "sentences": ["a"]}},
    LlamaCppEmbeddingRequest: {"content": "a"},
    RerankRequest: {"documents": ["a"]},
    ScoreRequest: {"text_1": "a", "text_2": "b"},
    CohereEmbedRequest: {"texts": ["a"]},
    GenerateRequest: {"text": "a"},
    GenerativeScoringRequest: {"query": "a", "items": ["b"], "label_token_ids": [5]},
    SystemOneRequest: {"questions": {"a": {"type": "noul"}}},
    DecisionRequest: {"questions": [{"type": "predicate", "instructions": "a"}]},
}
INSTEAD = {
    **dict.fromkeys(("queries", "data_1"), "text_1"),
    **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
    "texts": "documents",
    "input_ids": "text",
    "inputs": "texts",
}  # field → another field that must not be given with it
HELLO = [{"role": "user", "content": "a"}]


REQUIRED: dict[str, Any] = {
    "state": "a",
    "metadata": {},
    "items": [],
    "model": "a",
    "prompt": "a",
    "messages": HELLO,
    "input": "a",
    "max_tokens": 1,
    "tokens": [1],
    "text_1": "a",
    "text_2": "a",
    "query": "a",
    "documents": ["a"],
    "inputs": "a",
    "texts": ["a"],
    "receipt": RECEIPT,
    "request": {},
    "input_prefix": "a",
    "input_suffix": "a",
    "lora_name": "a",
    "lora_path": "a",
    "id": 1,
    "scale": 0.5,
    "adapters": [],
    "source": "a",
    "destination": "a",
    "input_file_id": "file-a",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "requests": [{"custom_id": "a", "params": {"model": "a", "messages": HELLO, "max_tokens": 1}}],
}


def properties() -> dict[str, tuple[type[RequestModel], str]]:
    """Returns the fields of all request types, but only one of several fields with the same name and schema."""
    found: dict[tuple[str, str], tuple[type[RequestModel], str]] = {}
    for kind in REQUESTS.values():
        for name, shape in request_schema(kind)["properties"].items():
            found.setdefault((name, repr(shape)), (kind, name))
    return {f"{kind.__name__}.{name}": (kind, name) for kind, name in found.values()}


FIELDS = properties()


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


BLOCKS = (
    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "1"},
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}], "is_error": True},
    {"type": "thinking", "thinking": "", "signature": "x"},
)


ITEMS = (
    {"type": "function_call", "call_id": "1", "name": "f"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "message", "role": "tool", "content": "a"},
    {"type": "item_reference", "id": "1"},
)


PARTS = (
    *({"text": "a"}, {"type": None, "text": "a"}, "a", {"image_url": "data:"}, {"text": "a", "image_url": "data:"}),
    *({"type": "thinking", "thinking": "a"}, {"type": "reasoning", "text": "a"}, {"type": "reasoning"}, {"a": "a"}),
    *({"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:", "detail": "low"}),
    *({"type": "refusal", "refusal": "a"}, {"refusal": "a"}, {"type": "image_url", "image_url": {}}, 5, None),
)


LIKELY = st.sampled_from(  # values near the bounds of fields
    [
        *(-(2**63) - 1, -(2**63), 2**64 - 1, 2**64, -100, -101, -2, -1, 0, 1, 2, 3, 20, 21, 100, 128, 129),
        *(0.5, -0.1, 1.1, 2.1, 100.5, "", "a", "text", "none", "openai", "auto", True, False),
        *([], [1], ["a"], [""], [0.5], [[1]], [[]], ["a", [1]], [1, "a"], [-1], ["x"] * 17, ["text"], [None]),
        *({}, {"5": 1}, {"5": 101}, {"a": 1}, {"12345678901": 1}, {"type": "text"}, {"type": "none"}),
        *({"type": "disabled"}, {"include_usage": True}, {"include_usage": None}, {"include_usage": 1}, {"other": 1}),
        *([{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": ""}]}]),
        *([{"role": "tool", "content": "a", "tool_call_id": "x", "name": None}], [{"role": "user"}]),
        *([{"role": "assistant", "content": None}], [{"role": "assistant", "tool_calls": []}], [{"role": "tool"}]),
        *([{"role": role, "content": "", "tool_calls": [CALL]}] for role in ("user", "assistant")),
        *([{"role": role, "content": [block]}] for role in ("user", "assistant") for block in (*BLOCKS, *PARTS)),
        *([{"role": role, "content": None, "refusal": "a"}] for role in ("user", "assistant")),
        *({"type": kind, **more} for kind in ("tool", "any", "function") for more in ({}, {"name": "f"})),
        *([{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}] for kind in ("object", 1)),
        *([item] for item in ITEMS),
        *({"a": {"type": kind}} for kind in ("noul", "choice", "x")),
        *({"a": {"type": "choice", "criteria": criteria}} for criteria in ({}, {"b": None}, {"b": 1}, ["b"])),
        *({"a": {"type": "score", "criteria": criteria}} for criteria in (["b"], ["b", "c"], {"b": "", "c": None})),
        *([{"type": kind, "instructions": "a"}] for kind in ("predicate", "choice", "x")),
        [{"type": "choice", "instructions": "a", "choices": [{"value": "a"}, {"value": True}]}],
        [{"type": "score", "instructions": [{"type": "input_text", "text": "a"}], "levels": [{"label": "a"}] * 2}],
        *([{"type": "function", "name": "f", "strict": strict}] for strict in (None, True, 1)),
        *(
            {"effort": "low", "summary": None},
            {"effort": "much"},
            {"verbosity": "medium"},
            {"format": {"type": "text"}},
        ),
        *([{"name": "f", "input_schema": {}}], [{"name": "a b", "input_schema": {}}], [{"type": "x"}], "required"),
        *({"type": "function", "function": {"name": "f"}}, {"type": "enabled", "budget_tokens": 1}),
        *([{"role": "user", "content": [{"type": "image", "text": ""}]}], [{"role": "user", "content": []}]),
        *(
            {"type": "json_object"},
            RECEIPT,
            {**RECEIPT, "signature": {"value": ""}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
            {"regex": "a"},
        ),
        *({"type": "json_schema", "json_schema": {"name": "a"}}, {"type": "json_schema", "schema": {}}),
        *([{"type": "text", "text": "a"}], [{"type": "text"}], [{"role": "wizard", "content": "a"}]),
    ]
)


def smallest(kind: type[RequestModel]) -> dict[str, Any]:
    own = OWN.get(kind, {})
    names = [name for name, field in fields_of(kind).items() if field.required and name not in own]
    return own | {name: REQUIRED[name] for name in names}


def plain(value: Any) -> bool:
    """Whether a value means the same to JSON Schema and to the server, unlike 1.0: an integer to JSON Schema only."""
    match value:
        case list():
            return all(map(plain, value))
        case dict():
            return all(map(plain, value.values()))
        case float():
            return math.isfinite(value) and not value.is_integer()
        case _:
            return True
