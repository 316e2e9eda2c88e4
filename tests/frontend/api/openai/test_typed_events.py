"""Typed events: refused requests, and the form of events."""

from typing import Any

import pytest

from frontend.api.openai import typed_events
from frontend.errors import Unprocessable
from frontend.request import Delta
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context
from tests.frontend.api.harness import FakeDeltas, last, lines, parse, response_context


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "max_tokens": 8} | more


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"logprobs": 1}, "logprobs"),
        ({"timings_per_token": True}, "timings_per_token"),
        ({"return_progress": True}, "return_progress"),
    ],
)
async def test_typed_events_refuse_unsupported_features(tokenizer: Tokenizer, more: dict[str, Any], param: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        await parse(typed_events, body(**more), context(tokenizer))
    assert refused.value.param == param


async def test_typed_events_are_always_a_stream(tokenizer: Tokenizer) -> None:
    assert (await parse(typed_events, body(stream=False, stream_format="events"), context(tokenizer))).stream


async def test_typed_events_transcript(tokenizer: Tokenizer) -> None:
    story = FakeDeltas([Delta(0, [9906], ['He"l'])], [Delta(0, [5, 6], ["", "é"])], [last(ids=(7,), texts=("",))])
    assert "".join(lines(typed_events.stream_writer(response_context(tokenizer, stream=True)), story)) == (
        'event: token\ndata: {"token": "He\\"l", "token_id": 9906}\n\n'
        'event: token\ndata: {"token": "", "token_id": 5}\n\n'
        'event: token\ndata: {"token": "é", "token_id": 6}\n\n'
        'event: token\ndata: {"token": "", "token_id": 7}\n\n'
        'event: done\ndata: {"finish_reason": "eos", "usage": '
        '{"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}\n\n'
    )


async def test_typed_events_carry_text_that_came_after_the_last_id(tokenizer: Tokenizer) -> None:
    story = FakeDeltas([Delta(0, [5], [""])], [last(texts=("\ufffd",))])
    text = "".join(lines(typed_events.stream_writer(response_context(tokenizer, stream=True)), story))
    assert 'data: {"token": "\ufffd", "token_id": null}' in text
