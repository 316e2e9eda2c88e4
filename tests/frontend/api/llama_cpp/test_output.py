"""Answers and events of llama.cpp's routes: probabilities, progress, timings, chosen fields, the end of the context."""

import json
from typing import Any

import pytest

from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared.messages import Outcome, Timings
from tests.fakes import FakePool, sending
from tests.frontend.serving import completing, http_client

BODY: dict[str, Any] = {"prompt": "Hi"}


def scoring(tokenizer: Tokenizer, *texts: str) -> FakePool:
    """Returns a pool whose worker sends these texts, with log-probabilities if the request asks for them."""
    pieces = [tokenizer.encode_now([text], False)[0] for text in texts]

    def play(pool: FakePool, stream: Stream) -> None:
        stream.started = Timings(1.0, 2.0, 0.0, 2)
        if (top := stream.submit.sampling.logprobs) is not None:
            pool.send_logprobs(stream, 0, [-0.5] * sum(map(len, pieces)), k=top)
        sending(*pieces, outcome=Outcome.LENGTH)(pool, stream)

    return FakePool(play)


async def post(tokenizer: Tokenizer, pool: FakePool, **fields: Any) -> Any:
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/completion", json=BODY | fields)
    if not fields.get("stream"):
        return answer.json()
    return [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n") if block]


async def test_probabilities_of_a_whole_answer(tokenizer: Tokenizer) -> None:
    body = await post(tokenizer, scoring(tokenizer, "hi!"), n_probs=2)
    assert (await post(tokenizer, scoring(tokenizer, "hi!"), logprobs=2))["generation_settings"]["n_probs"] == 2
    tokens = body["completion_probabilities"]
    assert [one["token"] for one in tokens] == ["h", "i", "!"]
    assert all(one["logprob"] == -0.5 and len(one["top_logprobs"]) == 2 for one in tokens)


async def test_stream_with_probabilities_has_an_event_for_each_token(tokenizer: Tokenizer) -> None:
    *parts, last = await post(tokenizer, scoring(tokenizer, "hi!", "?"), n_probs=3, stream=True)
    assert [part["content"] for part in parts] == ["h", "i", "!", "?"]
    assert [len(part["completion_probabilities"]) for part in parts] == [1] * 4
    assert [part["tokens_predicted"] for part in parts] == [1, 2, 3, 4]
    assert "completion_probabilities" not in last


async def test_probabilities_after_sampling(tokenizer: Tokenizer) -> None:
    fields = {"n_probs": 2, "temperature": 0.0, "post_sampling_probs": True}
    body = await post(tokenizer, scoring(tokenizer, "hi"), **fields)
    for one in body["completion_probabilities"]:
        assert one["prob"] == 1.0 and "logprob" not in one
        assert [rival["prob"] for rival in one["top_probs"]] == [1.0, 0.0]


async def test_progress_comes_first_and_timings_with_every_event(tokenizer: Tokenizer) -> None:
    pool = scoring(tokenizer, "h", "i")
    progress, *parts = await post(tokenizer, pool, stream=True, return_progress=True, timings_per_token=True)
    assert progress["prompt_progress"] == {"total": 3, "cache": 2, "processed": 3, "time_ms": 2.0}
    assert (progress["content"], progress["tokens"], progress["stop"]) == ("", [], False)
    assert all("prompt_progress" not in part for part in parts)
    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2, 2]
    assert (parts[0]["timings"]["prompt_n"], parts[0]["timings"]["cache_n"]) == (1, 2)
    assert parts[0]["timings"]["predicted_per_second"] == 0.0


async def test_plain_stream_has_neither(tokenizer: Tokenizer) -> None:
    *parts, last = await post(tokenizer, scoring(tokenizer, "h", "i"), stream=True)
    assert not any({"timings", "prompt_progress"} & part.keys() for part in parts) and "timings" in last


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_chosen_fields_are_told(tokenizer: Tokenizer, stream: bool) -> None:
    chosen = ["content", "generation_settings/n_predict", "prompt", "missing", "content/of"]
    body = await post(tokenizer, completing(tokenizer), n_predict=8, response_fields=chosen, stream=stream)
    last = body[-1] if stream else body
    said = "" if stream else "hello"
    assert last == {"content": said, "generation_settings/n_predict": 8, "prompt": "<s>Hi"}
    assert "model" in await post(tokenizer, completing(tokenizer), response_fields=[])


@pytest.mark.parametrize(("limit", "truncated"), [(-1, True), (509, False), (510, True)])
async def test_answer_is_truncated_where_only_the_context_ends_it(
    tokenizer: Tokenizer, limit: int, truncated: bool
) -> None:
    body = await post(tokenizer, completing(tokenizer, "a" * 509), n_predict=limit)
    assert (body["truncated"], body["stop_type"], body["tokens_predicted"]) == (truncated, "limit", 509)


async def test_settings_tell_what_was_used(tokenizer: Tokenizer) -> None:
    fields = {"logit_bias": [[97, 1.5], ["b", False]], "grammar": 'root ::= "hello"', "samplers": ["top_k"], "top_k": 3}
    settings = (await post(tokenizer, completing(tokenizer), **fields))["generation_settings"]
    assert settings["logit_bias"] == [{"token": 97, "bias": 1.5}, {"token": 65, "bias": None}]
    assert (settings["grammar"], settings["samplers"], settings["top_k"]) == ('root ::= "hello"', ["top_k"], 3)


async def test_line_break_is_told(tokenizer: Tokenizer) -> None:
    assert (await post(tokenizer, completing(tokenizer, "a\nb")))["has_new_line"] is True


async def test_receipt_is_told_if_asked_for(tokenizer: Tokenizer) -> None:
    body = await post(tokenizer, completing(tokenizer), receipt=True)
    assert body["receipt"]["route"] == "/completion" and body["receipt"]["finish_reason"] == "length"
