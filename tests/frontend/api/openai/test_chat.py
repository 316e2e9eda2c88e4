"""Transcripts of chat completions. A stream, assembled by a client, equals the complete response."""

import json
from dataclasses import replace
from typing import Any

import pytest

from frontend.api.openai import chat
from frontend.output_parser.model_format import ParserConfig, Reasoning
from frontend.request import Delta, Finish, TokenLogprob, Usage
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.frontend.api.harness import (
    FakeDeltas,
    fold_chat,
    last,
    lines,
    parse_sse,
    response_context,
)

HEAD = '{"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"tiny","system_fingerprint":null'


def asked(tokenizer: Tokenizer, **more: Any) -> Any:
    return replace(response_context(tokenizer, **more), prefix=chat.PREFIX)


async def streamed(tokenizer: Tokenizer, *story: Any, **more: Any) -> list[Any]:
    return parse_sse("".join(lines(chat.stream_writer(asked(tokenizer, stream=True, **more)), FakeDeltas(*story))))


async def test_chat_stream_transcript(tokenizer: Tokenizer) -> None:
    story = FakeDeltas([Delta(0, [5], [' "é"\n'])], [Delta(0, [6], [""])], [last(ids=(7, 8), texts=("b", ""))])
    assert lines(chat.stream_writer(asked(tokenizer, stream=True)), story) == [
        f'data: {HEAD},"choices":[{{"index":0,"delta":{{"role":"assistant","content":null,"refusal":null}},'
        '"logprobs":null,"finish_reason":null}]}\n\n'
        f'data: {HEAD},"choices":[{{"index":0,"delta":{{"content":" \\"é\\"\\n"}},'
        '"logprobs":null,"finish_reason":null}]}\n\n',
        f'data: {HEAD},"choices":[{{"index":0,"delta":{{"content":"b"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {HEAD},"choices":[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop",'
        '"stop_reason":null,"matched_stop":null,"seed":7}]}\n\n',
        "data: [DONE]\n\n",
    ]


async def test_stream_and_whole_answer_name_the_matched_stop(tokenizer: Tokenizer) -> None:
    for matched in (265, "END", None):
        *_, chunk, _ = await streamed(tokenizer, [last(matched_stop=matched)])
        assert chunk["choices"][0]["matched_stop"] == matched
        whole = json.loads(await chat.complete(asked(tokenizer), FakeDeltas([last(matched_stop=matched)])))
        assert whole["choices"][0]["matched_stop"] == matched


async def test_reasoning_that_is_not_streamed_comes_whole_at_its_end(tokenizer: Tokenizer) -> None:
    texts = ["<think>", "I ", "see", ".</think>", "Yes", "."]
    for pieces, cut in ((texts, False), (texts[:3], True)):  # the second output ends within its reasoning
        for in_pieces in (True, False):
            parser_config = ParserConfig(Reasoning.UNDECIDED, reasoning_in_pieces=in_pieces)
            story = [[Delta(0, [5], [text])] for text in pieces]
            chunks = await streamed(tokenizer, *story, [last()], parser_config=parser_config)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
            thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
            assert "".join(thoughts) == ("I see" if cut else "I see.") and (len(thoughts) == 1) is not in_pieces
            assert "".join(delta.get("content") or "" for delta in deltas) == ("" if cut else "Yes.")
            said = [name for delta in deltas for name in ("reasoning_content", "content") if delta.get(name)]
            assert said == sorted(said, reverse=True)  # the reasoning comes before the answer


async def test_chat_usage_chunk_has_no_choices(tokenizer: Tokenizer) -> None:
    chunks = await streamed(tokenizer, [Delta(0, [5], ["a"])], [last()], usage=True, timings=True)
    *chunks, usage, end = chunks
    assert end == "[DONE]" and [chunk["usage"] for chunk in chunks] == [None] * 3
    assert usage["choices"] == [] and usage["timings"]["decode_ms"] == 3.0
    assert usage["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


async def test_chat_continuous_usage(tokenizer: Tokenizer) -> None:
    chunks = await streamed(tokenizer, [Delta(0, [5], ["a"], usage=Usage(3, 1))], [last()], continuous_usage=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[1:-1]] == [1, 4]


@pytest.mark.parametrize(("finish", "word"), [(Finish.EOS, "stop"), (Finish.STOP, "stop"), (Finish.LENGTH, "length")])
async def test_chat_finish_reasons(tokenizer: Tokenizer, finish: Finish, word: str) -> None:
    chunks = await streamed(tokenizer, [last(finish=finish)])
    assert chunks[-2]["choices"][0]["finish_reason"] == word
    whole = json.loads(await chat.complete(asked(tokenizer), FakeDeltas([last(finish=finish)])))
    assert whole["choices"][0]["finish_reason"] == word


async def test_chat_stream_folds_to_the_complete_response(tokenizer: Tokenizer) -> None:
    scores = [TokenLogprob(66, -1.5, ((66, -1.5), (265, float("-inf"))))]
    story = [
        [Delta(1, [65, 66], ["a", "b"], logprobs=scores * 2), Delta(0, [68], [""], logprobs=scores)],
        [Delta(0, [69], ["é"], logprobs=scores)],
        [last(0, stop="END", finish=Finish.STOP, logprobs=[])],
        [last(1, (70,), ("c",), logprobs=scores, finish=Finish.LENGTH)],
    ]
    more: Any = {"n": 2, "usage": True, "sampling": Sampling(max_tokens=9, logprobs=2)}
    whole = json.loads(await chat.complete(asked(tokenizer, **more), FakeDeltas(*story)))
    chunks = await streamed(tokenizer, *story, **more)
    assert fold_chat(chunks[:-1]) == whole
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["é", "abc"]
    text = tokenizer.token_text(66)
    entry = {"token": text, "logprob": -1.5, "bytes": list(text.encode())}
    rival = {"token": "</s>", "logprob": -9999.0, "bytes": None}
    assert whole["choices"][1]["logprobs"]["content"] == [entry | {"top_logprobs": [entry, rival]}] * 3


def test_stream_writer_before_the_last_delta_writes_no_end(tokenizer: Tokenizer) -> None:
    written = chat.stream_writer(asked(tokenizer)).write([Delta(0, [5], ["a"])])
    assert written and b"DONE" not in written and b'"finish_reason":"' not in written


@pytest.mark.parametrize("parser_config", [None, ParserConfig()])
async def test_chat_continuous_usage_is_in_every_chunk_from_the_roles_on(
    tokenizer: Tokenizer, parser_config: ParserConfig | None
) -> None:
    story = [Delta(0, [5], ["a"], usage=Usage(3, 1))], [last(0), last(1)]
    chunks = await streamed(tokenizer, *story, continuous_usage=True, n=2, parser_config=parser_config)
    first, second, *rest = [chunk["usage"] for chunk in chunks[:-1]]
    assert first == second and (first["prompt_tokens"], first["completion_tokens"]) == (3, 0)
    assert [usage["completion_tokens"] for usage in rest] == sorted(usage["completion_tokens"] for usage in rest) != []
