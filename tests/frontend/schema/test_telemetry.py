"""llama.cpp's timings and progress, in the streams of OpenAI's formats."""

import json
from typing import Any

import pytest

from frontend.api.telemetry import TelemetryEvents, timings
from frontend.request import Delta, Telemetry
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared.messages import Timings
from tests.fakes import FakePool, sending
from tests.frontend.serving import completing, http_client

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}
ASKING = {"stream": True, "timings_per_token": True, "return_progress": True}


def telling(tokenizer: Tokenizer) -> FakePool:
    pieces = tokenizer.encode_now(['a\n\n"timings":', "b"], False)

    def play(pool: FakePool, stream: Stream) -> None:
        sending(*pieces)(pool, stream)

    return FakePool(play)


async def streamed(tokenizer: Tokenizer, path: str, **fields: Any) -> list[Any]:
    async with http_client(telling(tokenizer), tokenizer) as http:
        answer = await http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
async def test_events_are_the_same_but_for_timings_and_progress(tokenizer: Tokenizer, path: str) -> None:
    plain = await streamed(tokenizer, path, seed=1, stream=True)
    told = await streamed(tokenizer, path, seed=1, **ASKING)
    bare = [{key: value for key, value in one.items() if key not in ("timings", "prompt_progress")} for one in told]
    kinds = [
        (one.get("type"), [choice.get("delta", choice.get("text")) for choice in one.get("choices", [])])
        for one in bare
    ]
    assert kinds == [
        (one.get("type"), [choice.get("delta", choice.get("text")) for choice in one.get("choices", [])])
        for one in plain
    ]
    assert not any("timings" in one or "prompt_progress" in one for one in plain)


@pytest.mark.parametrize(
    ("path", "opening"), [("/v1/chat/completions", 1), ("/v1/completions", 0), ("/v1/responses", 2)]
)
async def test_every_event_of_the_answer_has_timings_and_the_opening_the_progress(
    tokenizer: Tokenizer, path: str, opening: int
) -> None:
    told = await streamed(tokenizer, path, **ASKING)
    assert ["timings" in one for one in told] == [False] * opening + [True] * (len(told) - opening)
    (at,) = [i for i, one in enumerate(told) if "prompt_progress" in one]
    progress = told[at]["prompt_progress"]
    assert at == max(0, opening - 1) and progress["processed"] == progress["total"] > 1
    last = told[-1]["timings"]
    assert last["prompt_n"] == progress["total"]
    assert last["predicted_n"] == sum(map(len, tokenizer.encode_now(['a\n\n"timings":', "b"], False)))


async def test_usage_chunk_has_timings_and_only_once(tokenizer: Tokenizer) -> None:
    fields = {"stream_options": {"include_usage": True}, "timings": True}
    *_, last = await streamed(tokenizer, "/v1/chat/completions", **fields, **ASKING)
    assert last["choices"] == [] and "usage" in last and "queue_ms" in last["timings"]


def test_times_and_cached_tokens_are_those_that_the_worker_tells_with_the_first_token() -> None:
    events = TelemetryEvents(Telemetry(timings=True, progress=True), 8, 1)
    begun = events.added(
        b'data: {"a":1}\n\ndata: {"b":1}\n\n', [Delta(0, [5], ["x"], timings=Timings(1.0, 2.5, 0.0, 3))]
    )
    first, second = [json.loads(line.removeprefix(b"data: ")) for line in begun.split(b"\n\n") if line]
    assert first == {"a": 1, "prompt_progress": {"total": 8, "cache": 3, "processed": 8, "time_ms": 2.5}}
    told = second["timings"]
    assert (told["cache_n"], told["prompt_n"], told["prompt_ms"], told["predicted_n"]) == (3, 5, 2.5, 1)
    assert events.added(b"data: [DONE]\n\n", ()) == b"data: [DONE]\n\n"


def test_rates_leave_out_the_first_token_which_the_prompt_yields() -> None:
    one, many = timings(2, 6, 3.0, 1, 0.0), timings(0, 8, 3.0, 16, 30.0)
    assert (one.predicted_per_second, one.predicted_per_token_ms, one.prompt_per_token_ms) == (0.0, 0.0, 0.5)
    assert (many.predicted_per_second, many.predicted_per_token_ms) == (500.0, 2.0)


async def test_tokens_of_a_chat_are_counted_as_the_chat_counts_them(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        whole = (await http.post("/v1/chat/completions", json={"messages": MESSAGES})).json()
        for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
            counted = (await http.post(path, json={"messages": MESSAGES})).json()
            assert counted["input_tokens"] == whole["usage"]["prompt_tokens"]


async def test_long_chat_is_refused_with_its_length_and_the_context(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a " * 9000}]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] > 0
