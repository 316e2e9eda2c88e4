"""llama.cpp's /completion over HTTP: whole answers, streams, several prompts, and refusals."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared.messages import Outcome
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import completing, http_client

PROMPT = {"prompt": "Hi"}


async def ask(tokenizer: Tokenizer, pool: FakePool, path: str = "/completion", **fields: Any) -> httpx.Response:
    async with http_client(pool, tokenizer) as http:
        return await http.post(path, json=PROMPT | fields)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n") if block]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_answer_has_llama_cpps_fields(tokenizer: Tokenizer, path: str) -> None:
    body = (await ask(tokenizer, completing(tokenizer), path, n_predict=8, return_tokens=True)).json()
    assert (body["content"], body["stop"], body["stop_type"], body["stopping_word"]) == ("hello", True, "limit", "")
    assert (body["index"], body["id_slot"], body["model"]) == (0, -1, MODEL)
    assert body["tokens"] == tokenizer.encode_now(["hello"], False)[0]
    assert (body["tokens_evaluated"], body["tokens_predicted"], body["tokens_cached"]) == (3, 4, 0)
    assert (body["prompt"], body["has_new_line"], body["truncated"]) == ("<s>Hi", False, False)
    assert (body["timings"]["prompt_n"], body["timings"]["cache_n"], body["timings"]["predicted_n"]) == (3, 0, 4)
    assert (body["timings"]["prompt_ms"], body["timings"]["prompt_per_second"]) == (2.0, 1500.0)
    settings = body["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["seed"], settings["n_ctx"]) == (8, 1.0, 77, 512)
    assert settings["dry_sequence_breakers"] == ["\n", ":", '"', "*"] and settings["n_keep"] == 0
    assert "completion_probabilities" not in body and "receipt" not in body


async def test_probabilities_after_all_samplers_are_the_workers(tokenizer: Tokenizer) -> None:
    def play(pool: FakePool, stream: Stream) -> None:
        pool.send_logprobs(stream, 0, [0.0, 0.0], k=2)
        pool.send_tokens(stream, [1, 2])
        pool.end(stream)

    pool = FakePool(play)
    asked = {
        "n_probs": 2, "post_sampling_probs": True, "typical_p": 0.5, "repeat_penalty": 1.2, "logit_bias": [[5, -9]],
        "dry_multiplier": 0.5, "dry_sequence_breakers": ["\n"],
    }  # fmt: skip
    body = (await ask(tokenizer, pool, **asked)).json()
    chain = pool.submitted[0].sampling.chain
    assert chain is not None and chain.reports and chain.dry is not None
    assert [one["prob"] for one in body["completion_probabilities"]] == [1.0, 1.0]
    assert [one["prob"] for one in body["completion_probabilities"][0]["top_probs"]] == [1.0, 1.0]
    assert body["generation_settings"]["dry_sequence_breakers"] == ["\n"]
    assert (
        body["generation_settings"]["repeat_penalty"] == 1.2 and "penalties" in body["generation_settings"]["samplers"]
    )


async def test_tokens_are_told_only_if_asked_for(tokenizer: Tokenizer) -> None:
    assert (await ask(tokenizer, completing(tokenizer))).json()["tokens"] == []


async def test_stream_has_parts_and_a_last_event_without_content(tokenizer: Tokenizer) -> None:
    answer = await ask(tokenizer, completing(tokenizer, outcome=Outcome.EOS), stream=True)
    *parts, last = events(answer)
    assert [part["stop"] for part in parts] == [False] * len(parts) and last["stop"] is True
    assert "".join(part["content"] for part in parts) == "hello" and all(part["tokens"] for part in parts)
    assert (last["content"], last["tokens"], last["stop_type"]) == ("", [], "eos")
    assert last["generation_settings"]["stream"] is True and "[DONE]" not in answer.text


async def test_stop_string_is_named(tokenizer: Tokenizer) -> None:
    for stop in (["", "ll"], "ll"):
        body = (await ask(tokenizer, completing(tokenizer), stop=stop)).json()
        assert (body["content"], body["stop_type"], body["stopping_word"]) == ("he", "word", "ll")
    assert (await ask(tokenizer, completing(tokenizer), stop="")).json()["content"] == "hello"


async def test_several_prompts_have_an_array_of_answers(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    body = (await ask(tokenizer, pool, prompt=["Hi", [39, 72], {"prompt_string": "Hi"}])).json()
    assert [one["index"] for one in body] == [0, 1, 2] and {one["content"] for one in body} == {"hello"}
    assert [one["prompt"] for one in body] == ["<s>Hi", "Hi", "<s>Hi"]
    assert [one.prompt for one in pool.submitted] == [[264, 39, 72], [39, 72], [264, 39, 72]]


async def test_several_answers_to_a_prompt(tokenizer: Tokenizer) -> None:
    for asked in ({"n_cmpl": 2}, {"n": 2}, {"n_cmpl": 2, "n": 9}):
        pool = completing(tokenizer)
        body = (await ask(tokenizer, pool, seed=5, **asked)).json()
        assert [one["index"] for one in body] == [0, 1] and [one.sampling.seed for one in pool.submitted] == [5, 6]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"n_predict": 3, "max_completion_tokens": 4, "max_tokens": 5}, 3), ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 5}, 4), ({"max_tokens": 5}, 5),
    ],
)  # fmt: skip
async def test_limit_has_several_names(tokenizer: Tokenizer, fields: dict[str, Any], limit: int) -> None:
    pool = completing(tokenizer)
    assert (await ask(tokenizer, pool, **fields)).status_code == 200
    assert pool.submitted[0].sampling.max_tokens == limit


async def test_answer_without_a_limit_goes_to_the_contexts_end(tokenizer: Tokenizer) -> None:
    for limit in ({}, {"n_predict": -1}, {"max_tokens": -1}, {"n_predict": 1000}):
        pool = completing(tokenizer)
        await ask(tokenizer, pool, **limit)
        assert pool.submitted[0].sampling.max_tokens == 512 - 3


async def test_prompt_alone_is_computed_for_no_tokens(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer, "")
    body = (await ask(tokenizer, pool, n_predict=0)).json()
    assert pool.submitted[0].sampling.max_tokens == 0 and (body["content"], body["tokens_predicted"]) == ("", 0)


async def test_long_prompt_is_refused_with_its_length(tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        answer = await ask(tokenizer, FakePool(), prompt=[72] * 600, stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (400, 400, "exceed_context_size_error")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512)
        assert "exceeds the available context size" in error["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mirostat": 3}, "`mirostat`"),
        ({"mirostat_tau": -1}, "`mirostat_tau`"),
        ({"xtc_probability": 1.5}, "`xtc_probability`"),
        ({"dynatemp_range": -0.5}, "`dynatemp_range`"),
        ({"min_keep": -1}, "`min_keep`"),
        ({"samplers": ["top_k", "top_z"]}, "`samplers`"),
        ({"samplers": "kz"}, "`samplers`"),
        ({"samplers": "k" * 21}, "`samplers`"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": []}, "`dry_sequence_breakers`"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ["x" * 41]}, "`dry_sequence_breakers[0]`"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ["x"] * 33}, "`dry_sequence_breakers`"),
        ({"dry_base": 0.5}, "`dry_base`"),
        ({"dry_penalty_last_n": -2}, "`dry_penalty_last_n`"),
        ({"xtc_threshold": -0.1}, "`xtc_threshold`"),
        ({"typical_p": 0.0}, "`typical_p`"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "`lora`"),
        ({"grammar": "root ::= ("}, "`grammar`"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "`json_schema`"),
        ({"logit_bias": [[1]]}, "`logit_bias`"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "`prompt.multimodal_data`"),
        ({"prompt": []}, "`prompt`"),
        ({"prompt": [1, [2]]}, "`prompt`"),
        ({"prompt": [999]}, "`prompt`"),
        ({"stop": ["x" * 20_000]}, "`stop`"),
        ({"receipt": True, "t_max_predict_ms": 5}, "`receipt`"),
        ({"n_probs": 21}, "`n_probs`"),
        ({"logprobs": 21}, "`logprobs`"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(tokenizer: Tokenizer, fields: dict[str, Any], named: str) -> None:
    pool = FakePool()
    answer = await ask(tokenizer, pool, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"], pool.calls) == (400, 400, "invalid_request_error", 0)
    assert named in error["message"], error


async def test_neutral_values_of_other_samplers_are_accepted(tokenizer: Tokenizer) -> None:
    fields = {
        "mirostat": 0, "mirostat_tau": 5.0, "dry_multiplier": 0.0, "dry_base": 1.75, "xtc_probability": 0.0,
        "typical_p": 1.0, "top_n_sigma": -1.0, "dynatemp_range": 0.0, "min_keep": 0, "id_slot": -1, "n_keep": 0,
        "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], "lora": [],
    }  # fmt: skip
    assert (await ask(tokenizer, completing(tokenizer), **fields)).status_code == 200


async def test_unknown_field_is_ignored_and_told(tokenizer: Tokenizer) -> None:
    answer = await ask(tokenizer, completing(tokenizer), **{"speculative.n_max": 4})
    assert answer.status_code == 200 and answer.headers["x-sluice-ignored-fields"] == "speculative.n_max"


async def test_key_is_needed_and_either_header_has_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    keys.chmod(0o600)
    async with http_client(completing(tokenizer), tokenizer, api_keys=str(keys)) as http:
        for path in ("/completion", "/completions", "/infill", "/apply-template", "/embedding"):
            denied = await http.post(path, json=PROMPT)
            assert (denied.status_code, denied.json()["error"]["type"]) == (401, "authentication_error"), path
            assert denied.json()["error"]["code"] == 401
        for path in ("/props", "/slots", "/models", "/lora-adapters"):
            assert (await http.get(path)).status_code == 401, path
        for header in ({"authorization": "Bearer sk-one"}, {"x-api-key": "sk-one"}):
            assert (await http.post("/completions", json=PROMPT, headers=header)).json()["content"] == "hello"


async def test_openais_completions_stay_where_they_were(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        theirs = await http.post("/v1/completions", json=PROMPT)
        strict = await http.post("/v1/completions", json=PROMPT | {"input_prefix": "a"})
        chat = await http.post("/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert theirs.json()["choices"][0]["text"] == "hello"
    assert (strict.status_code, strict.json()["error"]["code"]) == (422, "unknown_field")
    assert chat.json()["object"] == "chat.completion"


async def test_failure_in_mid_stream_ends_it_with_an_error(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer, outcome=Outcome.SHUTDOWN), tokenizer) as http:
        answer = await http.post("/completion", json=PROMPT | {"stream": True})
    *parts, last = events(answer)
    assert last["error"]["type"] == "unavailable_error" and last["error"]["code"] == 503
    assert not any(part["stop"] for part in parts)
