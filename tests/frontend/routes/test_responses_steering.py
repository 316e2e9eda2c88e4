"""Steering over a WebSocket: what a client adds to a response while it is generated."""

from typing import Any

import pytest
from openai.types.responses import (
    ResponseSteerAcceptedEvent,
    ResponseSteerFailedEvent,
    ResponseSteerPendingEvent,
)

from frontend.routes import responses_socket
from tests.frontend.api.scripted import WEATHER
from tests.frontend.kept.harness import Held
from tests.frontend.routes.test_responses_socket import HELLO, Socket, served
from tests.frontend.speaking import Model

SHORTER: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "Shorter"}]}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


def holding(model: Model, text: str) -> Held:
    """Returns a model that has begun each answer, which so has an id, and goes on when the test says so."""
    held = Held(model.tokenizer, text)
    held.allowed = 1
    return held


def prompts(held: Held, model: Model) -> list[str]:
    return [model.tokenizer.decode(one.prompt, skip_special=False) for one in held.pool.submitted]


async def begun(socket: Socket, **more: Any) -> str:
    await socket.send(**HELLO | more)
    return str((await socket.until("response.created"))["response"]["id"])


async def steered(socket: Socket, id: str, given: Any, **more: Any) -> dict[str, Any]:
    await socket.send(type="response.steer", previous_response_id=id, input=given, **more)
    return await socket.until("response.steer.accepted", "response.steer.failed", "error")


async def test_response_is_followed_by_one_to_what_was_added(qwen: Model) -> None:
    held = holding(qwen, "It was.")
    async with served(held.pool, qwen.tokenizer) as it, it.socket() as socket:
        id = await begun(socket, stream_id="lane", instructions="Be kind")
        told = [await steered(socket, id, "Faster"), await steered(socket, id, [SHORTER])]
        for event in told:
            assert ResponseSteerAcceptedEvent.model_validate(event).steer.previous_response_id == id
            assert event["stream_id"] == "lane"
        held.finish()
        assert (await socket.until("response.completed"))["response"]["id"] == id
        created = await socket.until("response.created")
        assert (created["stream_id"], created["response"]["previous_response_id"]) == ("lane", id)
        assert created["response"]["instructions"] == "Be kind"
        end = await socket.until("response.completed")
        await socket.turn(stream_id="other")  # the last event of a response comes a little before its turn has ended
        refused = await steered(socket, end["response"]["id"], "Late")
        assert refused["error"]["code"] == "response_already_completed" and "id" not in refused["steer"]
        assert (await socket.turn(previous_response_id=end["response"]["id"]))["type"] == "response.completed"
        assert not it.state.bodies.held
    _, second, _, third = prompts(held, qwen)
    places = [second.index(text) for text in ("Be kind", "Hello", "It was.", "Faster", "Shorter")]
    assert places == sorted(places) and "Shorter" in third


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unknown": ("x", {"previous_response_id": "resp_other"}, "response_not_found"),
    "no-response": ("x", {"previous_response_id": ""}, "response_not_found"),
    "field": ("x", {"stream_id": "lane"}, "invalid_input"),
    "empty": ([], {}, "invalid_input"),
    "role": ([{**SHORTER, "role": "system"}], {}, "invalid_input"),
    "item": ([{"type": "function_call_output", "call_id": "a", "output": "b"}], {}, "invalid_input"),
    "part": ([{"role": "user", "content": [{"type": "output_text", "text": "b"}]}], {}, "invalid_input"),
}


async def test_what_cannot_be_added_is_given_back(qwen: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_socket, "MOST_STEERS", 1)
    held = holding(qwen, "It was.")
    async with served(held.pool, qwen.tokenizer) as it, it.socket() as socket:
        id = await begun(socket)
        for name, (given, fields, code) in WRONG.items():
            await socket.send(**{"type": "response.steer", "previous_response_id": id, "input": given, **fields})
            event = await socket.until("response.steer.failed")
            assert event["error"]["code"] == code, name
            assert event["steer"] == {"previous_response_id": fields.get("previous_response_id", id), "input": given}
        assert (await steered(socket, id, "One"))["type"] == "response.steer.accepted"
        assert (await steered(socket, id, "Two"))["error"]["code"] == "too_many_pending_steers"
        await socket.send(type="response.steer", previous_response_id=5, input="b")
        assert (await socket.until("error"))["error"]["param"] == "previous_response_id"
        warm = await begun(socket, generate=False, stream_id="warm")
        assert (await steered(socket, warm, "x"))["error"]["code"] == "steering_not_supported"


async def test_what_was_added_waits_for_results_of_tools(qwen: Model) -> None:
    held = holding(qwen, WEATHER)
    async with served(held.pool, qwen.tokenizer) as it, it.socket() as socket:
        id = await begun(socket, tools=[TOOL])
        accepted = await steered(socket, id, "In Rome")
        held.finish()
        (call,) = (await socket.until("response.completed"))["response"]["output"]
        pending = ResponseSteerPendingEvent.model_validate(await socket.until("response.steer.pending"))
        assert pending.steer.id == accepted["steer"]["id"]
        (stub,) = [one.to_dict() for one in pending.required_input]
        assert stub == {"type": "function_call_output", "call_id": call["call_id"], "name": "get_weather"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain"}
        assert (await socket.turn(previous_response_id=id, input=[result]))["type"] == "response.completed"
        assert not it.state.bodies.held
    second = prompts(held, qwen)[1]
    assert second.index("In Rome") < second.index("Rain")


async def test_what_was_added_is_given_back_when_the_next_request_is_refused(qwen: Model) -> None:
    held = holding(qwen, WEATHER)
    async with served(held.pool, qwen.tokenizer) as it, it.socket() as socket:
        id = await begun(socket, tools=[TOOL])
        accepted = await steered(socket, id, "In Rome")
        held.finish()
        await socket.until("response.steer.pending")
        await socket.send(**HELLO | {"previous_response_id": id, "input": 5})
        events = {one["type"]: one for one in [await socket.event(), await socket.event()]}
        assert events["error"]["error"]["param"] == "input"
        failed = ResponseSteerFailedEvent.model_validate(events["response.steer.failed"])
        assert (failed.error.code, failed.steer.id) == ("successor_creation_failed", accepted["steer"]["id"])
        assert not it.state.bodies.held


@pytest.mark.parametrize("code", ["response_not_active", "successor_creation_failed"])
async def test_what_was_added_and_not_answered_is_given_back(
    qwen: Model, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Another request came in place of the one with the results of tools, or the response is not remembered."""
    other = code == "response_not_active"
    held = holding(qwen, WEATHER if other else "It was.")
    async with served(held.pool, qwen.tokenizer) as it, it.socket() as socket:
        if not other:
            monkeypatch.setattr(it.state.remembered, "_most", 600)
        id = await begun(socket, tools=[TOOL] if other else [], input="Hello" + " there" * 100)
        accepted = await steered(socket, id, "Rome")
        held.finish()
        await socket.until("response.completed")
        if other:
            await socket.send(**HELLO)
        failed = ResponseSteerFailedEvent.model_validate(await socket.until("response.steer.failed"))
        assert (failed.error.code, failed.steer.id, failed.steer.input) == (code, accepted["steer"]["id"], "Rome")
        if other:
            await socket.until("response.completed")
        assert not it.state.bodies.held
