"""Transcripts of completions. A stream, assembled by a client, equals the complete response."""

import json
from typing import Any

import pytest

from frontend.api.openai import completions, typed_events
from frontend.errors import Internal
from frontend.request import Delta, Finish, TokenLogprob, Usage
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.frontend.api.harness import (
    FakeDeltas,
    last,
    lines,
    parse_sse,
    response_context,
)

HEAD = '{"id":"cmpl-0","object":"text_completion","created":1,"model":"tiny","system_fingerprint":null'


async def test_completion_stream_transcript(tokenizer: Tokenizer) -> None:
    asked = response_context(tokenizer, stream=True)
    story = FakeDeltas([Delta(0, [5], [' "é"\n'])], [Delta(0, [6], [""])], [last(ids=(7, 8), texts=("b", ""))])
    assert lines(completions.stream_writer(asked), story) == [
        f'data: {HEAD},"choices":[{{"index":0,"text":" \\"é\\"\\n","logprobs":null,"finish_reason":null}}]}}\n\n',
        f'data: {HEAD},"choices":[{{"index":0,"text":"b","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {HEAD},"choices":[{{"index":0,"text":"","logprobs":null,"finish_reason":"stop",'
        '"stop_reason":null,"matched_stop":null,"seed":7}]}\n\n',
        "data: [DONE]\n\n",
    ]


async def test_openai_usage_chunk_has_no_choices(tokenizer: Tokenizer) -> None:
    asked = response_context(tokenizer, stream=True, usage=True, timings=True)
    *chunks, end = parse_sse(
        "".join(lines(completions.stream_writer(asked), FakeDeltas([Delta(0, [5], ["a"])], [last()])))
    )
    assert end == "[DONE]"
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    assert chunks[-1]["timings"] == {
        "queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 3.0, "cached_tokens": 2, "draft_tokens": 7,
        "accepted_draft_tokens": 5,
        "inter_token_p50_ms": 0.0, "inter_token_p99_ms": 0.0,
    }  # fmt: skip


async def test_openai_timings_without_usage_are_on_the_last_finish(tokenizer: Tokenizer) -> None:
    asked = response_context(tokenizer, stream=True, timings=True, n=2)
    chunks = parse_sse("".join(lines(completions.stream_writer(asked), FakeDeltas([last(0)], [last(1)]))))
    assert ["timings" in chunk for chunk in chunks[:-1]] == [False, True]


async def test_openai_running_usage(tokenizer: Tokenizer) -> None:
    asked = response_context(tokenizer, stream=True, continuous_usage=True)
    story = FakeDeltas([Delta(0, [5], ["a"], usage=Usage(3, 1))], [last()])
    chunks = parse_sse("".join(lines(completions.stream_writer(asked), story)))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [1, 4]


@pytest.mark.parametrize("api_format", [completions, typed_events])
def test_stream_writer_before_the_last_delta_writes_no_end(tokenizer: Tokenizer, api_format: Any) -> None:
    written = api_format.stream_writer(response_context(tokenizer, stream=True)).write([Delta(0, [5], ["a"])])
    assert written and b"DONE" not in written and b"done" not in written


def test_stream_error_in_each_api_format(tokenizer: Tokenizer) -> None:
    error = Internal('it\'s "broken"', code="worker_error")
    assert completions.stream_error(error, "r", response_context(tokenizer)) == (
        b'data: {"error":{"message":"it\'s \\"broken\\"","type":"internal_error",'
        b'"param":null,"code":"worker_error"}}\n\n'
    )
    assert (
        typed_events.stream_error(error, "r", response_context(tokenizer))
        == b'event: error\ndata: {"error": "it\'s \\"broken\\""}\n\n'
    )
    assert typed_events.error(error, "r") == b'{"error":"it\'s \\"broken\\""}'


async def test_completion_stream_folds_to_the_complete_response(tokenizer: Tokenizer) -> None:
    scores = [TokenLogprob(65, float("nan")), TokenLogprob(66, -1.5, ((66, -1.5), (67, -2.5)))]
    story = [
        [Delta(1, [65, 66], ["a", "b"], logprobs=scores), Delta(0, [68], [""], logprobs=scores[1:])],
        [Delta(0, [69], ["é"], logprobs=scores[1:])],
        [last(0, stop="END", finish=Finish.STOP)],
        [last(1, (70,), ("c",), logprobs=scores[1:], finish=Finish.LENGTH)],
    ]
    asked = response_context(tokenizer, n=2, usage=True, sampling=Sampling(max_tokens=9, logprobs=2))
    whole = json.loads(await completions.complete(asked, FakeDeltas(*story)))
    chunks = parse_sse("".join(lines(completions.stream_writer(asked), FakeDeltas(*story))))
    assert fold(chunks[:-1]) == whole
    assert whole["usage"]["prompt_tokens"] == 3 and whole["usage"]["completion_tokens"] == 8
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "length"]
    assert whole["choices"][1]["logprobs"] == {
        "tokens": [tokenizer.token_text(id) for id in (65, 66, 66)],
        "token_logprobs": [None, -1.5, -1.5],
        "top_logprobs": [None] + [{tokenizer.token_text(66): -1.5, tokenizer.token_text(67): -2.5}] * 2,
        "text_offset": [0, 1, 2],
    }


def fold(chunks: list[Any]) -> dict[str, Any]:
    """Assembles the whole response from the chunks of a stream, as a client does."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
            choice["text"] += piece["text"]
            for key, values in (piece["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(key, []).extend(values)
            choice |= {
                key: piece[key] for key in ("finish_reason", "stop_reason", "matched_stop", "seed") if key in piece
            }
    head = {key: chunks[0][key] for key in ("id", "object", "created", "model", "system_fingerprint")}
    return head | {"choices": [choices[i] for i in sorted(choices)], "usage": chunks[-1]["usage"]}


async def test_openai_running_usage_is_in_every_chunk(tokenizer: Tokenizer) -> None:
    asked = response_context(tokenizer, stream=True, continuous_usage=True, n=2)
    story = FakeDeltas([Delta(0, [5], ["a"], usage=Usage(3, 1))], [last(0), last(1)])
    chunks = parse_sse("".join(lines(completions.stream_writer(asked), story)))
    assert len(chunks) == 4 and all(chunk["usage"]["prompt_tokens"] == 3 for chunk in chunks[:-1])
