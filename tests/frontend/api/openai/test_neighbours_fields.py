"""The fields of vLLM, SGLang and llama.cpp on the strict /v1/completions: each works, has no effect or is refused."""

from typing import Any

import pytest

from frontend.text.tokenizer import Tokenizer
from tests.frontend.serving import completing, http_client

ACCEPTED: list[dict[str, Any]] = [
    {"seed": (1 << 64) - 1}, {"seed": -(1 << 63)}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 1},
    {"truncation_side": "right", "truncate_prompt_tokens": 1}, {"add_special_tokens": False}, {"request_id": "mine"},
    {"detokenize": True}, {"return_token_ids": True}, {"return_tokens_as_token_ids": True, "logprobs": 1},
    {"top_k": -1}, {"top_k": 0}, {"min_tokens": 1}, {"allowed_token_ids": [5]}, {"bad_words": ["x"]},
    {"skip_special_tokens": False}, {"include_stop_str_in_output": True}, {"spaces_between_special_tokens": False},
    {"vllm_xargs": {"a": 1}}, {"regex": "a+"}, {"ebnf": 'root ::= "a"'}, {"kv_transfer_params": None},
    {"stop_regex": None}, {"prompt_embeds": None}, {"ignore_eos": True}, {"min_p": 0.1}, {"priority": 1},
    {"n_predict": -1}, {"cache_prompt": False}, {"id_slot": 0}, {"n_probs": 0}, {"session_id": "s"}, {"lora": []},
    {"stream_interval": 4}, {"watermarking": None}, {"thinking_token_budget": -1},
    {"timings_per_token": True, "stream": True}, {"return_progress": True, "stream": True},
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("seed", {"seed": 1 << 64}), ("seed", {"seed": -(1 << 63) - 1}), ("stop_regex", {"stop_regex": "a+"}),
    ("prompt_embeds", {"prompt_embeds": "AAAA"}), ("kv_transfer_params", {"kv_transfer_params": {"do_remote": True}}),
    ("detokenize", {"detokenize": False}), ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("top_k", {"top_k": -2}), ("use_beam_search", {"use_beam_search": True}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("allowed_token_ids", {"allowed_token_ids": [1 << 30]}), ("stop_token_ids", {"stop_token_ids": [1 << 30]}),
    ("logit_bias", {"logit_bias": {"1073741824": 1}}), ("n_predict", {"n_predict": 0}),
    ("n_probs", {"n_probs": 3}), ("lora", {"lora": [{"id": 0, "scale": 1}]}), ("extra_key", {"extra_key": "a"}),
]  # fmt: skip


async def answer(tokenizer: Tokenizer, fields: dict[str, Any]) -> Any:
    async with http_client(completing(tokenizer), tokenizer) as http:
        return await http.post("/v1/completions", json={"prompt": "Hi there", "max_tokens": 2} | fields)


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda fields: "-".join(fields))
async def test_field_is_accepted(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    got = await answer(tokenizer, fields)
    assert got.status_code == 200, got.text


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_field_is_refused_by_name_and_in_words(tokenizer: Tokenizer, param: str, fields: dict[str, Any]) -> None:
    got = await answer(tokenizer, fields)
    error = got.json()["error"]
    assert got.status_code == 422, got.text
    assert error["param"].startswith(param) and param in error["message"] and len(error["message"].split()) > 2


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("asked", "limit"), [(3, 3), (-1, None), (-2, None)])
async def test_n_predict_is_the_limit(tokenizer: Tokenizer, route: str, asked: int, limit: int | None) -> None:
    pool = completing(tokenizer)
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "n_predict": asked}
    body.pop("messages" if route == "/v1/completions" else "prompt")
    async with http_client(pool, tokenizer) as http:
        assert (await http.post(route, json=body)).status_code == 200
    (one,) = pool.submitted
    assert one.sampling.max_tokens == (limit or 512 - len(one.prompt))
