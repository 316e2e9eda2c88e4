"""The items of a response: events, log-probabilities, ends."""

from typing import Any

import httpx
import pytest

from shared.messages import Outcome
from tests.fakes import MODEL
from tests.frontend.api.harness import parse_events
from tests.frontend.api.scripted import CITY, SAID, WEATHER
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "Of a city.", "parameters": CITY},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]


ASKED: dict[str, Any] = {"model": MODEL, "input": "Weather?", "max_output_tokens": 500}


SCORED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


async def sent(model: Model, **more: Any) -> httpx.Response:
    async with http_client(model.pool, model.tokenizer) as http:
        return await http.post("/v1/responses", json=ASKED | more)


async def post(model: Model, **more: Any) -> Any:
    return (await sent(model, **more)).json()


async def told(model: Model, **more: Any) -> list[dict[str, Any]]:
    """Returns the events of a stream.

    Asserts that an event's name is its type, and that sequence numbers count from 0.
    """
    answer = await sent(model, **more, stream=True)
    events = parse_events(answer.text)
    names = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_response_stream_has_openais_events(qwen: Model) -> None:
    qwen.says, qwen.size = [SAID], 500
    events = await told(qwen, tools=TOOLS)

    def item(kind: str, *steps: str) -> list[str]:
        return ["output_item.added", *[f"{kind}.{step}" if step in ("delta", "done") else step for step in steps],
                "output_item.done"]  # fmt: skip

    part = ("content_part.added", "delta", "done", "content_part.done")
    calling = item("function_call_arguments", "delta", "done")
    kinds = [event["type"].removeprefix("response.") for event in events]
    merged = [kind for i, kind in enumerate(kinds) if not (kind.endswith("delta") and kind == kinds[i - 1])]
    assert merged == [
        "created", "in_progress", *item("reasoning_text", *part), *item("output_text", *part), *calling, *calling,
        "completed",
    ]  # fmt: skip
    opened = [event["item"]["status"] for event in events if event["type"] == "response.output_item.added"]
    closed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert opened == ["in_progress"] * 4 and closed == events[-1]["response"]["output"]
    assert (events[0]["response"]["status"], events[0]["response"]["usage"]) == ("in_progress", None)


@pytest.mark.parametrize("more", [
    {}, {"stop": "look"}, SCORED, {"tools": TOOLS}, {"tools": TOOLS, **SCORED}, {"tools": TOOLS, "stop": "Paris"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 500])
async def test_response_stream_folds_to_the_complete_response(qwen: Model, more: dict[str, Any], size: int) -> None:
    """A stream, however it is cut, gives the complete response with the same usage."""
    qwen.says, qwen.size = [SAID] * 2, size
    whole = await post(qwen, **more, seed=1)
    events = await told(qwen, **more, seed=1)
    assert nameless(events[-1]["response"]) == nameless(whole)
    for i, item in enumerate(whole["output"]):
        deltas = [event["delta"] for event in events if event.get("output_index") == i and "delta" in event]
        assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    scores = [score for event in events if event["type"].endswith("text.delta") for score in event.get("logprobs", ())]
    messages = [item for item in whole["output"] if item["type"] == "message"]
    assert scores == [score for item in messages for score in item["content"][0]["logprobs"]]
    assert bool(scores) is ("include" in more)
    qwen.says, qwen.size = [SAID], 1
    assert (await post(qwen, **more, seed=1))["usage"] == whole["usage"]


def nameless(response: dict[str, Any]) -> dict[str, Any]:
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    ids = {"id", "created_at", "completed_at"}
    return {name: value for name, value in response.items() if name not in ids} | {"output": items}


async def test_reasoning_tokens_are_counted(qwen: Model) -> None:
    thought, text = "<think>\nHm.\n</think>", "\n\nWell."
    qwen.says = [thought + text, text.strip(), "<b>"]
    counts = [(await post(qwen))["usage"] for _ in range(3)]
    tokens = len(qwen.tokenizer.encode_now([thought], False)[0])
    assert [count["output_tokens_details"]["reasoning_tokens"] for count in counts] == [tokens, 0, 0]


async def test_log_probabilities_are_those_of_the_text(qwen: Model) -> None:
    qwen.says = ["<think>\nHm.\n</think>\n\nWell."]
    (_, message) = (await post(qwen, **SCORED))["output"]
    entries = message["content"][0]["logprobs"]
    qwen.says = ["Well."]
    (message,) = (await post(qwen, top_logprobs=1))["output"]
    scores = message["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in scores] == [2] * 5  # the most likely token and the chosen token
    joined = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert joined.endswith("Well.") and "Hm" not in joined and len(entries[0]["top_logprobs"]) == 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_response_cut_off_is_incomplete(qwen: Model, streamed: bool) -> None:
    qwen.outcome, ended = Outcome.LENGTH, []
    for said in ("<think>Hm", "Hell", f"I look.\n{WEATHER[:-30]}", ""):
        qwen.says = [said]
        more = {"tools": TOOLS}
        ended.append((await told(qwen, **more))[-1]["response"] if streamed else await post(qwen, **more))
    for one in ended:
        assert (one["status"], one["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert one["completed_at"] is None
    assert [[(item["type"], item["status"]) for item in one["output"]] for one in ended] == [
        [("reasoning", "incomplete")], [("message", "incomplete")],
        [("message", "completed"), ("function_call", "incomplete")], [("message", "incomplete")],
    ]  # fmt: skip
