"""Ollama's messages become messages for chat templates, in which each result of a tool names its call."""

from frontend.api.ollama.types import Message, chat_messages
from frontend.schema.decoding import convert

CALLS = [{"function": {"name": "a", "arguments": {"x": 1}}}, {"function": {"name": "b", "arguments": {}}}]


def shown(*messages: dict[str, object]) -> list[dict[str, object]]:
    return chat_messages([convert(one, Message) for one in messages])


def test_results_answer_calls_by_name_else_in_their_order() -> None:
    assistant = {"role": "assistant", "tool_calls": CALLS}
    by_name = shown(assistant, {"role": "tool", "content": "2", "tool_name": "b"}, {"role": "tool", "content": "1"})
    first, second = [call["id"] for call in by_name[0]["tool_calls"]]  # type: ignore[attr-defined]
    assert [(one["tool_call_id"], one["name"]) for one in by_name[1:]] == [(second, "b"), (first, "a")]


def test_ids_of_the_client_are_kept() -> None:
    calls = [CALLS[0] | {"id": "one"}, CALLS[0] | {"id": "two"}]
    messages = shown(
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "two"},
        {"role": "tool", "content": "1", "tool_call_id": "one"},
    )
    assert [one.get("tool_call_id") for one in messages] == [None, "two", "one"]


def test_calls_of_two_turns_have_different_ids() -> None:
    turn = [{"role": "assistant", "tool_calls": CALLS[:1]}, {"role": "tool", "content": "1"}]
    messages = shown(*turn, *turn)
    assert messages[1]["tool_call_id"] != messages[3]["tool_call_id"]


def test_result_without_a_call_is_shown_as_it_is() -> None:
    assert shown({"role": "tool", "content": "1"}) == [{"role": "tool", "content": "1"}]
    assert shown({"role": "assistant", "thinking": "Hm.", "content": "a"})[0]["thinking"] == "Hm."
