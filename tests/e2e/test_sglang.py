"""SGLang's /generate on a real server, called as in SGLang's documentation and in training frameworks."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.checkpoints import Checkpoints
from tests.e2e.server import Server, serving
from tests.patience import PATIENCE_S

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("sglang") / "log"
    with serving(checkpoints("llama"), log, "--dtype", "float32", "--max-seq-len", "256", held=True) as one:
        yield one


def generate(server: Server, **body: Any) -> Any:
    answer = requests.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S)
    answer.raise_for_status()
    return answer.json()


def test_ids_of_a_rollout_come_with_their_log_probabilities(server: Server) -> None:
    ids = server.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    params = {"temperature": 0.8, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
    asked = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    output = generate(server, **asked)
    meta = output["meta_info"]
    tokens = [item[1] for item in meta["output_token_logprobs"]]
    assert tokens == output["output_ids"] and len(tokens) == meta["completion_tokens"] == 12
    assert all(math.isfinite(item[0]) and item[0] <= 0 and item[2] is None for item in meta["output_token_logprobs"])
    assert [len(place) for place in meta["output_top_logprobs"]] == [2] * 12
    assert meta["input_token_logprobs"] == [] and meta["prompt_tokens"] == len(ids)
    again = generate(server, text=PROMPT, sampling_params=params)
    assert (again["text"], again["output_ids"]) == (output["text"], tokens), "a text is the same prompt"
    assert again["meta_info"]["cached_tokens"] >= 0 and meta["finish_reason"] == {"type": "length", "length": 12}


def test_prompt_is_scored_with_and_without_an_answer(server: Server) -> None:
    asked: dict[str, Any] = {"text": PROMPT, "return_logprob": True, "return_text_in_logprobs": True}
    whole = generate(server, **asked, logprob_start_len=0, sampling_params={"max_new_tokens": 1, "temperature": 0})
    scored = whole["meta_info"]["input_token_logprobs"]
    assert len(scored) == whole["meta_info"]["prompt_tokens"] and scored[0][0] is None
    assert all(value <= 0 for value, *_ in scored[1:]) and all(isinstance(text, str) for *_, text in scored)
    only = generate(server, **asked, logprob_start_len=2, sampling_params={"max_new_tokens": 0})
    assert only["meta_info"]["input_token_logprobs"] == scored[2:]
    assert (only["text"], only["output_ids"], only["meta_info"]["output_token_logprobs"]) == ("", [], [])


def test_prefix_is_cached_by_a_request_without_an_answer(server: Server) -> None:
    prefix = "A prefix that many prompts share. " * 4
    cached = generate(server, text=prefix, sampling_params={"max_new_tokens": 0})
    assert (cached["text"], cached["output_ids"], cached["meta_info"]["completion_tokens"]) == ("", [], 0)
    after = generate(server, text=prefix + "And on", sampling_params={"max_new_tokens": 1})["meta_info"]
    assert after["cached_tokens"] > cached["meta_info"]["prompt_tokens"] / 2


def test_stream_is_read_as_the_documentation_does(server: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body: dict[str, Any] = {"text": PROMPT, "sampling_params": params, "stream": True}
    response = requests.post(f"{server.url}/generate", json=body, stream=True, timeout=PATIENCE_S)
    prev, said = 0, ""
    for line in response.iter_lines(decode_unicode=False):
        chunk = line.decode("utf-8")
        if chunk and chunk.startswith("data:"):
            if chunk == "data: [DONE]":
                break
            data = json.loads(chunk[5:].strip("\n"))
            output = data["text"]
            said += output[prev:]
            prev = len(output)
    assert said == generate(server, text=PROMPT, sampling_params=params)["text"] != ""
    assert data["meta_info"]["finish_reason"]["type"] == "length"


def test_batch_keeps_to_schemas_and_stops(server: Server) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    params = {"temperature": 1, "max_new_tokens": 60, "json_schema": schema}
    for one in generate(server, text=[PROMPT, "Once"], sampling_params=[params, params]):
        assert set(json.loads(one["text"])) == {"a"} and one["meta_info"]["finish_reason"]["type"] == "stop"
