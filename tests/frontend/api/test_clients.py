"""Fields that well-known clients send by default, recorded from each client, are accepted."""

from typing import Any

import httpx
import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import ResponseTextConfigParam
from openai.types.responses import response_create_params as response_params
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.shared_params import Reasoning

from frontend.api.anthropic.messages_request import MessageCountRequest, MessageRequest
from frontend.api.openai import responses_request
from frontend.api.openai.chat_request import ChatRequest
from frontend.api.openai.completions import CompletionRequest
from frontend.api.openai.responses_request import ResponseCountRequest, ResponseRequest
from frontend.schema.base import RequestModel, fields_of
from frontend.schema.request_fields import PromptCacheOptions
from frontend.structured_output.fields import TextOptions
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, TEMPLATE, FakePool, sending
from tests.frontend.serving import app_over

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
DUMPED = {
    "content": "a", "refusal": None, "role": "assistant", "annotations": None, "audio": None, "function_call": None,
    "tool_calls": None,
}  # fmt: skip
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
PLAIN = {"presence_penalty": 0, "frequency_penalty": 0, "top_p": 1}
NULLS = dict.fromkeys(("temperature", "top_p", "stop", "frequency_penalty", "presence_penalty", "parallel_tool_calls"))

CHAT: dict[str, dict[str, Any]] = {
    "lm-evaluation-harness": {
        "messages": [USER[0] | {"type": "text"}], "temperature": 0, "stop": ["\n\n"], "seed": 1234, "top_k": 50,
    },
    "the openai package, its last answer sent back": {"messages": [*USER, DUMPED, *USER]},
    "the openai package, all it knows for caching": {
        "messages": USER, "prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "b",
        "store": False, "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False},
    },
    "the openai package, all it knows for GPT-5": {
        "messages": USER, "verbosity": "low", "reasoning_effort": "minimal", "service_tier": "priority", "store": True,
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m", "prewarm": False},
    },
    "LangChain": {"messages": USER, "temperature": 0.7, "n": 1, "stream": False},
    "LibreChat": {"messages": USER, "user": "6523", "temperature": 1, "stream": True, **PLAIN},
    "Open WebUI": {"messages": USER, **USAGE},
    "Cline and Vercel's AI SDK": {"messages": PARTS, "temperature": 0, **USAGE},
    "SillyTavern": {"messages": USER, "temperature": 1, "n": 1, "logit_bias": {}, "stop": [], "stream": True, **PLAIN},
    "Continue": {"messages": USER, "stream": True, **NULLS},
    "those who speak through gateways with Anthropic, too": {
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": None},
        ]}],
    },
    "who foretells the answer": {
        "messages": USER, "prediction": {"type": "content", "content": "hi"}, "prompt_cache_options": {"mode": "auto"},
    },
    "clients of vLLM and SGLang, what they need not say": {
        "messages": USER, "use_beam_search": False, "length_penalty": 1, "early_stopping": False, "bad_words": [],
        "include_stop_str_in_output": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "prompt_logprobs": None, "return_token_ids": False, "separate_reasoning": True, "include_reasoning": True,
    },
    "no log-probabilities": {"messages": USER, "logprobs": False, "top_logprobs": None},
}  # fmt: skip
COMPLETIONS: dict[str, dict[str, Any]] = {
    "lm-evaluation-harness": {
        "prompt": [[1, 2], [3]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
    },
    "the openai package, all defaults spelled out": {
        "prompt": "a", "suffix": "", "temperature": 1, "n": 1, "stream": False, "logprobs": None, "echo": False,
        "stop": None, "best_of": 1, "logit_bias": {}, "user": "x", **PLAIN,
    },
    "LangChain": {"prompt": ["a"], "temperature": 0.7, "n": 1, "seed": None, "logprobs": None, **PLAIN},
}  # fmt: skip


# (request type, parameters of the SDK, parameters that the SDK sends as headers)
SDK_TYPES: list[tuple[type[RequestModel], Any, set[str]]] = [
    (ChatRequest, chat_params.CompletionCreateParamsBase, set()),
    (CompletionRequest, completion_params.CompletionCreateParamsBase, set()),
    (ResponseRequest, response_params.ResponseCreateParamsBase, set()),
    (ResponseCountRequest, InputTokenCountParams, set()),
    (TextOptions, ResponseTextConfigParam, set()),
    (responses_request.ReasoningOptions, Reasoning, set()),
    (PromptCacheOptions, response_params.PromptCacheOptions, set()),
    (MessageRequest, MessageCreateParamsBase, {"user_profile_id", "workspace_id"}),
    (MessageCountRequest, MessageCountTokensParams, {"user_profile_id", "workspace_id"}),
]


@pytest.mark.parametrize(("ours", "theirs", "headers"), SDK_TYPES, ids=[ours.__name__ for ours, *_ in SDK_TYPES])
def test_every_field_of_the_official_packages_is_known(
    ours: type[RequestModel], theirs: Any, headers: set[str]
) -> None:
    assert {*theirs.__optional_keys__, *theirs.__required_keys__} <= {*fields_of(ours), *ours.ONLY} | headers


async def status(tokenizer: Tokenizer, path: str, body: dict[str, Any], **headers: str) -> tuple[int, str]:
    app = app_over(FakePool(play=sending(tokenizer.encode_now(["hi"], False)[0])), tokenizer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        answer = await http.post(path, json={"model": MODEL, most: 5} | body, headers=headers)
    return answer.status_code, answer.text


@pytest.mark.parametrize("client", CHAT)
async def test_chat(tokenizer: Tokenizer, client: str) -> None:
    code, text = await status(tokenizer, "/v1/chat/completions", CHAT[client])
    assert code == 200 and "hi" in text, text


@pytest.mark.parametrize("client", COMPLETIONS)
async def test_completions(tokenizer: Tokenizer, client: str) -> None:
    code, text = await status(tokenizer, "/v1/completions", COMPLETIONS[client])
    assert code == 200 and "hi" in text, text


async def test_messages_with_the_headers_and_fields_of_anthropics_package(tokenizer: Tokenizer) -> None:
    kept = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": None}
    body = {
        "messages": [*USER, {"role": "assistant", "content": [kept]}, {"role": "user", "content": [kept]}],
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "x"}, "thinking": {"type": "disabled"}, "tools": [], "service_tier": "auto",
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "prompt-caching-2024-07-31,other"}
    code, text = await status(tokenizer, "/v1/messages?beta=true", body, **headers)
    assert code == 200 and "hi" in text, text


async def test_messages_of_claude_code(tokenizer: Tokenizer) -> None:
    """Leaves out Claude Code's tools, because the template of this test has no place for tools."""
    said = {"type": "text", "text": "hi"}
    body = {
        "messages": [
            {"role": "user", "content": [said, said | {"cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "more"},
        ],
        "system": [said, said | {"cache_control": {"type": "ephemeral"}}], "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "stream": True,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    code, text = await status(tokenizer, "/v1/messages?beta=true", body)
    assert code == 200 and "hi" in text, text


async def test_responses_of_codex(tokenizer: Tokenizer) -> None:
    """Leaves out Codex's tools, because the template of this test has no place for tools."""
    said = [{"type": "input_text", "text": "hi"}]
    body = {
        "stream": True, "tool_choice": "auto", "parallel_tool_calls": True, "store": False,
        "input": [{"type": "message", "id": f"msg_{r}", "role": r, "content": said} for r in ("developer", "user")],
        "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a",
        "client_metadata": {"session_id": "b"}, "text": {"verbosity": "low"},
    }  # fmt: skip
    code, text = await status(tokenizer, "/v1/responses", body)
    assert code == 200 and "hi" in text, text


async def test_a_harness_may_ask_for_the_tokenizer(tokenizer: Tokenizer) -> None:
    transport = httpx.ASGITransport(app_over(FakePool(), tokenizer))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        info = (await http.get("/tokenizer_info")).json()
    assert info["bos_token"] == tokenizer.named_tokens.get("bos_token") and info["vocab_size"] == 269
    assert info["chat_template"] == TEMPLATE and "eos_token" in info
