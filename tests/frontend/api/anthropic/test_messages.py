"""Transcripts of Anthropic's messages. A stream, assembled by a client, equals the complete response."""

import json

import pytest

from frontend.api.anthropic import messages
from frontend.request import Delta, Finish, Usage
from frontend.text.tokenizer import Tokenizer
from tests.frontend.api.harness import (
    FakeDeltas,
    fold_message_events,
    last,
    lines,
    parse_events,
    response_context,
)

USAGE = '"usage":{"input_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d,"output_tokens":%d}'


async def test_message_stream_transcript(tokenizer: Tokenizer) -> None:
    story = FakeDeltas([Delta(0, [5], ['"é"\n'])], [Delta(0, [6], [""])], [last(ids=(7, 8), texts=("b", ""))])
    assert lines(messages.stream_writer(response_context(tokenizer, stream=True)), story) == [
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_0","type":"message",'
        '"role":"assistant","model":"tiny","content":[],"stop_reason":null,"stop_sequence":null,' + USAGE % (0, 0)
        + "}}\n\n"
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"\\"é\\"\\n"}}\n\n',
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"b"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        + USAGE % (0, 4) + ',"seed":7}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ]  # fmt: skip


async def test_message_continuous_usage_and_timings(tokenizer: Tokenizer) -> None:
    asked = response_context(tokenizer, stream=True, continuous_usage=True, timings=True)
    story = FakeDeltas([Delta(0, [5], ["a"], usage=Usage(3, 1))], [Delta(0, [6], [""], usage=Usage(3, 2))], [last()])
    events = parse_events("".join(lines(messages.stream_writer(asked), story)))
    running = [event["usage"]["output_tokens"] for event in events if event["type"] == "content_block_delta"]
    assert running == [1, 2]
    assert events[-2]["timings"]["prefill_ms"] == 2.0


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        (Finish.EOS, None, "end_turn", None),
        (Finish.STOP, "END", "stop_sequence", "END"),
        (Finish.STOP, 17, "end_turn", None),  # a stop token id, for which Anthropic has no stop reason
        (Finish.LENGTH, None, "max_tokens", None),
    ],
)
async def test_message_stream_folds_to_the_complete_response(
    tokenizer: Tokenizer, finish: Finish, stop: str | int | None, reason: str, sequence: str | None
) -> None:
    story = [[Delta(0, [5], ["a"])], [Delta(0, [6, 7], ["", "é"])], [last(ids=(8,), finish=finish, stop=stop)]]
    asked = response_context(tokenizer)
    whole = json.loads(await messages.complete(asked, FakeDeltas(*story)))
    assert fold_message_events(parse_events("".join(lines(messages.stream_writer(asked), FakeDeltas(*story))))) == whole
    assert whole["content"] == [{"type": "text", "text": "aé"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_stream_writer_before_the_last_delta_writes_no_end(tokenizer: Tokenizer) -> None:
    written = messages.stream_writer(response_context(tokenizer)).write([Delta(0, [5], ["a"])])
    assert written and b"_stop" not in written.replace(b'"stop_', b"")
