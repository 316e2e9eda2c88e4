"""bench/workloads/kills.py counts answers without a proper end as lost, and answers with another text as different."""

import json

import httpx
import pytest

from bench.client.load_client import Target
from bench.workloads.kills import Answer, ask, row

TARGET = Target("http://server", "m")


def piece(text: str, finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}]}) + "\n\n"


@pytest.mark.parametrize(
    "body, text",
    [
        (piece("a") + piece("b") + piece("", "length") + "data: [DONE]\n\n", "ab"),
        (piece("a") + piece("b", "length"), None),
        (piece("a") + "data: [DONE]\n\n", None),
        (piece("a") + piece("", "error") + "data: [DONE]\n\n", None),
        ("", None),
    ],
)
async def test_answer_is_whole_or_lost(body: str, text: str | None) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    async with httpx.AsyncClient(transport=transport) as client:
        assert (await ask(client, TARGET, 1, 2)).text == text


async def test_connection_that_breaks_is_a_lost_answer() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset")

    async with httpx.AsyncClient(transport=httpx.MockTransport(broken)) as client:
        assert (await ask(client, TARGET, 1, 2)).text is None


def test_row_counts_lost_and_different_answers() -> None:
    expected = [Answer("a", 0.1), Answer("b", 0.2), Answer("c", 0.1)]
    assert row(0, 0, expected, expected, 1.0) == ["none", "3", "0", "0", "0.2", "1"]
    answers = [Answer("a", 1), Answer(None, 2), Answer("x", 3)]
    assert row(4, 3, answers, expected, 9) == [
        "3 of 4",
        "3",
        "1",
        "1",
        "3.0",
        "9",
    ]
