"""Calls and results of a conversation, as the templates of different formats show them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.chat.history import as_the_template_shows, call, chat_message, merge_same_role
from frontend.output_parser.model_format import ModelFormat, ToolFormat
from frontend.text.chat_template import ChatTemplate
from tests.fakes import MODEL
from tests.frontend.api.scripted import CITY, WEATHER
from tests.frontend.speaking import Model, tokenizer_with
from tests.growth import growth
from tests.templates import GLM, PLAIN, QWEN35

TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
SAID = [
    chat_message("user", "Weather?"),
    chat_message("assistant", "I look.", calls=[call("a", "f", {"x": [1, "ü"], "y": "z"}), call("b", "g", {})]),
    chat_message("tool", "20") | {"tool_call_id": "a"},
    chat_message("tool", "30") | {"tool_call_id": "b"},
]


def test_results_are_shown_in_the_order_of_their_calls() -> None:
    user, said, one, other = SAID
    style = ModelFormat(ToolFormat.HERMES)
    again = [said, one, chat_message("user", "Go on."), other]
    assert as_the_template_shows([user, said, other, one, *again], style) == [*SAID, *again]
    assert as_the_template_shows([said, other, user, one], style) == [said, one, user, other]
    lost = [said, other, chat_message("tool", "?") | {"tool_call_id": "z"}, chat_message("assistant", "Hm."), one]
    assert as_the_template_shows(lost, style) == lost


def test_kimis_calls_are_numbered() -> None:
    _, said, one, other = as_the_template_shows(SAID, ModelFormat(ToolFormat.KIMI))
    assert [each["id"] for each in said["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert (one["tool_call_id"], other["tool_call_id"]) == ("functions.f:0", "functions.g:1")


def test_glm4_shows_each_call_as_metadata_and_its_result_as_an_observation() -> None:
    assert as_the_template_shows(SAID, ModelFormat(ToolFormat.GLM4))[1:] == [
        {"role": "assistant", "metadata": "f", "content": '{"x": [1, "ü"], "y": "z"}'},
        {"role": "observation", "content": "20"},
        {"role": "assistant", "metadata": "g", "content": "{}"},
        {"role": "observation", "content": "30"},
    ]


def test_arguments_are_text_for_a_template_that_takes_them_for_text() -> None:
    style = ModelFormat(ToolFormat.DEEPSEEK_V31, arguments_as_text=True)
    calls = as_the_template_shows(SAID, style)[1]["tool_calls"]
    assert [one["function"]["arguments"] for one in calls] == ['{"x": [1, "ü"], "y": "z"}', "{}"]


def test_calls_are_text_for_a_template_that_knows_none() -> None:
    user, said, result = as_the_template_shows(SAID, ModelFormat(ToolFormat.HERMES, calls_as_text=True))
    assert user == SAID[0] and (said["role"], result["role"]) == ("assistant", "user") and "tool_calls" not in said
    assert said["content"].startswith("I look.\n<tool_call>") and said["content"].count("<tool_call>") == 2
    assert result["content"] == "<tool_response>\n20\n</tool_response>\n<tool_response>\n30\n</tool_response>"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (QWEN35, 'I look.\n\n<tool_call>\n<function=f>\n<parameter=x>\n[1, "ü"]\n</parameter>\n<parameter=y>\nz\n'),
        (
            GLM,
            '<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>[1, "ü"]</arg_value>\n<arg_key>y</arg_key>\n<arg_value>z<',
        ),
    ],
)
def test_templates_with_parameters_between_tags_show_the_calls(source: str, shown: str) -> None:
    style = ModelFormat.of({"default": source})
    assert shown in ChatTemplate({"default": source}, {}).render(as_the_template_shows(SAID, style))


@pytest.mark.parametrize("system", [True, False])
async def test_tools_for_a_template_that_knows_none(tmp_path: Path, system: bool) -> None:
    """Tools are described in the system message or, if there is none, in the user's message."""
    source = PLAIN if system else PLAIN.replace("'system'", "'developer'")
    model = Model(tokenizer_with(tmp_path, source), [WEATHER, "Sunny."])
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "max_tokens": 500}
    asked["messages"] = [{"role": "system", "content": "Be brief."}] * system + [
        {"role": "user", "content": "Weather?"}
    ]
    async with model.served() as url, httpx.AsyncClient(base_url=url) as http:
        first = (await http.post("/v1/chat/completions", json=asked)).json()["choices"][0]
        (made,) = first["message"]["tool_calls"]
        assert first["finish_reason"] == "tool_calls" and made["function"]["name"] == "get_weather"
        result = {"role": "tool", "tool_call_id": made["id"], "content": "20 degrees"}
        more = asked | {"messages": [*asked["messages"], first["message"], result]}
        second = await http.post("/v1/chat/completions", json=more)
    assert second.json()["choices"][0]["message"]["content"] == "Sunny.", second.text
    prompt = model.prompts[1]
    assert '<tools>\n{"name": "get_weather"' in prompt and "20 degrees" in prompt
    assert prompt.count('<tool_call>\n{"name": "get_weather"') == 1 and "get_weather" in model.grammars[0]
    if system:
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    else:
        assert prompt.startswith("<|im_start|>user\n# Tools") and "\n\nWeather?" in prompt


async def test_result_and_the_next_question_are_two_turns_where_the_template_shows_results(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "!{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}<|im_end|>\n{% endfor %}"
    )
    model = Model(tokenizer_with(tmp_path, source), ["Sunny."] * 3)
    made = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    said = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "a", "content": "20 degrees"},
        {"role": "user", "content": "And now?"},
    ]
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "20 degrees"}
    blocks = [
        said[0],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "a", "output": "20 degrees"},
        {"role": "user", "content": "And now?"},
    ]
    async with model.served() as url, httpx.AsyncClient(base_url=url) as http:
        for route, body in (
            ("chat/completions", {"messages": said}),
            ("messages", {"messages": blocks, "max_tokens": 50}),
            ("responses", {"input": items}),
        ):
            answer = await http.post(f"/v1/{route}", json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
    turns = ["user\nWeather?", 'assistant\n!get_weather({"city": "Bern"})', "tool\n20 degrees", "user\nAnd now?"]
    for prompt in model.prompts:
        assert prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)


def test_messages_of_one_role_are_joined_in_linear_time() -> None:
    """Joining 10,000 messages pair by pair took thirty times as long."""

    def prepared(count: int) -> Callable[[], Any]:
        return partial(merge_same_role, [chat_message("user", "x" * 1000) for _ in range(count)])

    assert growth(prepared, 2000) < 24
    (joined,) = prepared(10_000)()
    assert len(joined["content"]) == 10_000 * 1001 - 1


def test_empty_texts_beside_calls_and_thoughts_add_no_lines() -> None:
    one = call("c", "f", {})
    (joined,) = merge_same_role([
        chat_message("assistant", ""), chat_message("assistant", "", calls=[one]), chat_message("assistant", "a"),
        chat_message("assistant", "", "why"), chat_message("assistant", "b"),
    ])  # fmt: skip
    assert (joined["content"], joined["tool_calls"], joined["thinking"]) == ("a\nb", [one], "why")
    assert merge_same_role([chat_message("user", ""), chat_message("user", "")])[0]["content"] == "\n"


def test_many_calls_of_one_message_are_split_in_linear_time() -> None:
    """Calls keep their order, and each call is followed by its result.

    Comparing every one of 6,000 calls with all results took 6 s.
    """

    def prepared(count: int) -> Callable[[], Any]:
        calls = [call(f"c{i}", "f", {}) for i in range(count)]
        results = [chat_message("tool", str(i)) | {"tool_call_id": f"c{i}"} for i in reversed(range(count))]
        said = [chat_message("assistant", "", calls=calls), *results]
        return partial(as_the_template_shows, said, ModelFormat(ToolFormat.LLAMA))

    assert growth(prepared, 750) < 24
    shown = prepared(6000)()
    assert [one.get("tool_call_id", one.get("tool_calls")) for one in shown[:2]] == [[call("c0", "f", {})], "c0"]
    assert [one["content"] for one in shown[1::2]] == [str(i) for i in range(6000)]
