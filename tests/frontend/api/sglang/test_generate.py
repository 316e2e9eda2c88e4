"""SGLang's /generate over HTTP: whole answers, streams, several prompts, and refusals."""

import itertools
import json
from typing import Any

import httpx
import pytest

from frontend.api.answer import ResponseContext
from frontend.api.sglang.generate import EventWriter
from frontend.api.sglang.types import GenerateRequest
from frontend.request import Delta, Finish, GenerationRequest
from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome, Sampling
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import completing, http_client


async def ask(tokenizer: Tokenizer, pool: FakePool, **fields: Any) -> httpx.Response:
    prompt = {} if "input_ids" in fields else {"text": "Hi"}
    async with http_client(pool, tokenizer) as http:
        return await http.post("/generate", json=prompt | fields)


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_answer_has_sglangs_fields(tokenizer: Tokenizer) -> None:
    body = (await ask(tokenizer, completing(tokenizer), sampling_params={"max_new_tokens": 8}, rid="mine")).json()
    ids = tokenizer.encode_now(["hello"], False)[0]
    assert body.keys() == {"text", "output_ids", "meta_info"} and (body["text"], body["output_ids"]) == ("hello", ids)
    meta = body["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": len(ids)}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, len(ids), 0)
    assert meta["e2e_latency"] > 0 and meta["weight_version"] and "output_token_logprobs" not in meta


async def test_end_tells_what_matched(tokenizer: Tokenizer) -> None:
    async def finish(pool: FakePool, **params: Any) -> Any:
        return (await ask(tokenizer, pool, sampling_params=params)).json()["meta_info"]["finish_reason"]

    ended = await finish(completing(tokenizer, outcome=Outcome.EOS))
    assert ended["type"] == "stop" and type(ended["matched"]) is int
    assert await finish(completing(tokenizer), stop=["ll"]) == {"type": "stop", "matched": "ll"}


async def test_sampling_parameters_have_sglangs_names(tokenizer: Tokenizer) -> None:
    params = {
        "max_new_tokens": 8, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 1 << 30, "min_p": 0.1,
        "frequency_penalty": 0.25, "presence_penalty": 0.5, "repetition_penalty": 1.5, "sampling_seed": 7,
        "stop_token_ids": [5], "ignore_eos": True, "logit_bias": {"5": -1.5},
    }  # fmt: skip
    pool = completing(tokenizer)
    assert (await ask(tokenizer, pool, sampling_params=params)).status_code == 200
    [sent] = [one.stream.submit.sampling for one in pool.submitted]
    assert sent == Sampling(8, 0.5, 0.9, sent.top_k, 0.1, 1.5, 0.5, 0.25, 7, 2, (5,), True, ((5, -1.5),))
    assert sent.top_k == 269, "as many as there are"
    pool = completing(tokenizer)
    assert (await ask(tokenizer, pool)).json()["text"] == "hello"
    assert pool.submitted[0].stream.submit.sampling.max_tokens == 128


async def test_several_prompts_and_answers_have_an_array(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    params = [{"max_new_tokens": 8, "n": 2}] * 2
    body = (await ask(tokenizer, pool, text=["Hi", "Ho"], sampling_params=params, rid=["a", "b"])).json()
    assert [one["meta_info"]["id"] for one in body] == ["a", "a", "b", "b"]
    assert {one["text"] for one in body} == {"hello"}
    one = (await ask(tokenizer, completing(tokenizer), text=["Hi"])).json()
    assert [answer["text"] for answer in one] == ["hello"], "an array with one prompt has an array, too"
    ids = (await ask(tokenizer, pool, input_ids=[[39, 72], [5]], rid="x")).json()
    assert [answer["meta_info"]["id"] for answer in ids] == ["x_0", "x_1"]
    assert [one.prompt for one in pool.submitted[-2:]] == [[39, 72], [5]], "ids stay as they are"


async def test_details_may_be_an_array_of_equal_entries(tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    pool = completing(tokenizer)
    alone = (await ask(tokenizer, pool, text=["Hi", "Ho"], **asked)).json()
    arrays = {name: [value] * 2 for name, value in asked.items()}
    again = (await ask(tokenizer, pool, text=["Hi", "Ho"], **arrays)).json()
    details = [[one["meta_info"]["output_top_logprobs"] for one in answers] for answers in (alone, again)]
    assert details[0] == details[1]
    sent = [one.stream.submit.sampling for one in pool.submitted]
    assert [(one.logprobs, one.prompt_logprobs, one.prompt_top) for one in sent] == [(2, True, 2)] * 4
    one = (await ask(tokenizer, pool, return_logprob=[True])).json()
    assert "output_token_logprobs" in one["meta_info"] and "output_top_logprobs" not in one["meta_info"]


async def test_each_event_of_a_stream_has_all_so_far(tokenizer: Tokenizer) -> None:
    told = events(await ask(tokenizer, completing(tokenizer), stream=True))
    texts = [one["text"] for one in told]
    assert all(late.startswith(early) for early, late in itertools.pairwise(texts)) and texts[-1] == "hello"
    assert told[-1]["output_ids"] == tokenizer.encode_now(["hello"], False)[0]
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "length" and "index" not in told[0]
    several = events(await ask(tokenizer, completing(tokenizer), text=["Hi", "Ho"], stream=True))
    assert {one["index"] for one in several} == {0, 1}


async def test_bytes_of_a_long_stream_do_not_grow_with_its_square(tokenizer: Tokenizer) -> None:
    context = ResponseContext(
        GenerationRequest(([1],), Sampling(4096), stream=True, format_data=GenerateRequest(text="a")), tokenizer
    )
    writer, sizes = EventWriter(context), []
    for _ in range(4095):
        sizes.append(len(writer.write([Delta(0, [65], ["a"])])))
    sizes.append(len(writer.write([Delta(0, [65], ["a"], finish=Finish.LENGTH)])))
    assert all(sizes[:128]), "an event for each token of a short answer"
    assert sum(map(bool, sizes)) < 700 and sizes[-1] > 0 and sum(sizes) < 250 * sizes[-1]


async def test_failed_stream_has_an_error_and_an_end(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer, outcome=Outcome.ERROR)
    assert "message" in events(await ask(tokenizer, pool, stream=True))[-1]["error"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text": None}, "text"), ({"text": ""}, "text"), ({"text": []}, "text"), ({"text": [1]}, "text[0]"),
    ({"input_ids": []}, "input_ids"), ({"input_ids": [[]]}, "input_ids"), ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [999]}, "input_ids"), ({"input_ids": [1], "text": "a"}, "input_ids"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
    ({"sampling_params": {"stop": ["x" * 9000] * 2}}, "sampling_params.stop"),
    ({"sampling_params": {"regex": "a", "ebnf": "start: A"}}, "ebnf"),
    ({"sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
    ({"text": ["a", "b"], "return_logprob": [True, False]}, "return_logprob"),
    ({"text": ["a", "b"], "logprob_start_len": [0]}, "logprob_start_len"),
    ({"text": ["a", "b"], "top_logprobs_num": [1, 2]}, "top_logprobs_num"),
    ({"top_logprobs_num": []}, "top_logprobs_num"),
    ({"return_logprob": [True], "logprob_start_len": [0], "stream": True}, "logprob_start_len"),
    ({"lora_id": "a"}, "lora_id"), ({"positional_embed_overrides": [1]}, "positional_embed_overrides"),
    ({"return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
    ({"image_data": "a.png"}, "image_data"), ({"return_hidden_states": True}, "return_hidden_states"),
    ({"token_ids_logprob": [5]}, "token_ids_logprob"), ({"model": "other"}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_cannot_be_done_is_refused_by_name(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    pool = FakePool()
    answer = await ask(tokenizer, pool, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, pool.calls) == (404 if param == "model" else 400, 0)
    assert error["param"] == param and f"`{param}`" in error["message"], error


async def test_model_and_server_tell_what_clients_read(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        for path in ("/model_info", "/get_model_info"):
            model = (await http.get(path)).json()
            assert (model["model_path"], model["is_generation"]) == (MODEL, True)
            assert model["has_image_understanding"] is False
        for path in ("/server_info", "/get_server_info"):
            server = (await http.get(path)).json()
            assert (server["served_model_name"], server["context_length"]) == (MODEL, 512)
            assert server["internal_states"][0]["last_gen_throughput"] == 0.0
        assert (await http.get("/health_generate")).status_code == 200
        assert (await http.post("/flush_cache")).status_code == (await http.get("/flush_cache")).status_code == 403
