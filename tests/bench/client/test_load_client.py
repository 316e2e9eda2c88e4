"""The load client with a small fake server: requests, time stamps, counts, and when a call counts as failed."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from bench.client.load_client import Call, Record, Target, run
from tests.bench.fake_server import DONE, END, HEAD, chunk, event, serving, stream
from tests.patience import PATIENCE_S

CALL = Call(0.0, [300, 301], 5)


async def one(writes: Sequence[bytes], pause: float = 0.0) -> Record:
    async with serving(lambda body: writes, pause) as server:
        [record] = await run(server.target, [CALL])
        return record


async def test_stream_with_continuous_usage_counts_every_token() -> None:
    writes = stream(event("a", 1), event("", 2), event("bcd", 5), event("", 5, "length"), event(None, 5))
    record = await one(writes, pause=0.02)
    assert record.error == ""
    assert record.counts == [1, 1, 3], "an event without text has its token, the finish event has none"
    assert record.sent < record.stamps[0] < record.stamps[1] < record.stamps[2] < record.done
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 5, 4)


async def test_event_with_text_without_usage_is_one_token() -> None:
    record = await one(stream(event("a"), event(""), event("b"), event("c", 9, "length"), event(None, 9)), pause=0.02)
    assert (record.counts, record.completion_tokens) == ([1, 1, 1], 9)


async def test_events_of_one_write_share_a_stamp() -> None:
    record = await one([HEAD, chunk(event("a", 1)), chunk(event("b", 2) + event("c", 3) + DONE) + END], pause=0.02)
    assert record.counts == [1, 2]
    assert record.stamps[0] < record.stamps[1]


async def test_data_line_split_over_two_chunks_is_one_line() -> None:
    data = event("a", 1)
    record = await one([HEAD, chunk(data[:11]), chunk(data[11:]), chunk(DONE) + END], pause=0.01)
    assert (record.error, record.counts) == ("", [1])


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 33\r\n\r\n" + b'{"error": {"message": "it waits"}}'[:33]], "503: "),
        ([b'HTTP/1.1 422 No\r\n\r\n{"error": {"message": "no model m"}}'], "422: no model m"),
        ([b"HTTP/1.1 500 Oh\r\ncontent-length: 4\r\n\r\noops"], "500: oops"),
        ([HEAD, chunk(event("a", 1)), chunk(b'data: {"error": {"message": "the worker is gone"}}\n\n') + END], "gone"),
        ([HEAD, chunk(event("a", 1))], "broke off"),
        ([HEAD, chunk(event("a", 1)), END], "without [DONE]"),
        ([HEAD, chunk(DONE), END], "without a token"),
        ([HEAD, chunk(b"data: {what\n\n"), END], "not understood"),
        ([HEAD, b"what?\r\n"], "chunk without a size"),
        ([], "without an answer"),
    ],
)
async def test_incomplete_stream_is_a_failure_with_its_reason(writes: list[bytes], said: str) -> None:
    record = await one(writes)
    assert said in record.error
    assert record.done >= record.sent


async def test_call_without_a_server_is_a_failed_record() -> None:
    async with serving(lambda body: []) as server:
        url = server.url
    [record] = await run(Target(url, "m"), [CALL])
    assert record.error.startswith("connection")


async def test_request_body_asks_for_all_tokens_greedily() -> None:
    async with serving(lambda body: stream(event("a", 1))) as server:
        await run(Target(server.url + "/v1", "m", {"seed": 3}), [CALL])
    [body] = server.bodies
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ([300, 301], 5, 0, True)
    assert (body["stream"], body["seed"]) == (True, 3)


async def test_calls_are_sent_at_their_times() -> None:
    ended: list[Record] = []
    async with serving(lambda body: stream(event("a", 1)), pause=0.05) as server:
        records = await run(server.target, [CALL, CALL, Call(0.08, [300], 1)], ended.append)
    assert server.most >= 2
    assert records[0].sent < 0.08 <= records[2].sent
    assert sorted(map(id, ended)) == sorted(map(id, records))


async def test_sequential_calls_wait_for_each_other() -> None:
    async with serving(lambda body: stream(event("a", 1)), pause=0.005) as server:
        records = await asyncio.wait_for(run(server.target, [CALL] * 4, sequential=True), PATIENCE_S)
    assert server.most == 1
    assert all(before.done <= after.sent for before, after in pairwise(records))
