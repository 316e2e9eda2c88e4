"""OpenAI's responses against the app: the official SDK, bare HTTP, and a model with a script."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model, tokenizer_with
from tests.frontend.test_protocols_messages import parse_events
from tests.frontend.test_tools_http import NOW, SAID, WEATHER, chat
from tests.templates import LLAMA3, QWEN3

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "Of a city.", "parameters": CITY},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
ASKED: dict[str, Any] = {"model": MODEL, "input": "Weather?", "max_output_tokens": 500}
SCORED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CHATTED = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def qwen(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "qwen", QWEN3))


@pytest.fixture
def llama(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "llama", LLAMA3))


async def answered(sdk: openai.AsyncOpenAI, streamed: bool, **fields: Any) -> Any:
    if not streamed:
        return await sdk.responses.create(**fields)
    async with sdk.responses.stream(**fields) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


async def sent(model: Model, **more: Any) -> httpx.Response:
    async with http_client(model.link, model.tokenizer) as http:
        return await http.post("/v1/responses", json=ASKED | more)


async def post(model: Model, **more: Any) -> Any:
    return (await sent(model, **more)).json()


async def told(model: Model, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name, numbered from 0."""
    answer = await sent(model, **more, stream=True)
    events = parse_events(answer.text)
    names = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# one turn after the other


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_loop_of_calls_and_results(qwen: Model, streamed: bool) -> None:
    qwen.says = [SAID, "<think>\nGood.\n</think>\n\nSunny."]
    async with qwen.served() as url, chat(url) as sdk:
        first = await answered(sdk, streamed, **ASKED, tools=TOOLS)
        thought, said, weather, now = first.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm.", [])
        assert (said.content[0].text, first.output_text, first.status) == ("I look.", "I look.", "completed")
        assert [(call.name, json.loads(call.arguments), call.status) for call in (weather, now)] == [
            ("get_weather", {"city": "Paris"}, "completed"), ("now", {}, "completed"),
        ]  # fmt: skip
        history: list[Any] = [{"role": "user", "content": "Weather?"}, *first.output]
        history += [
            {"type": "function_call_output", "call_id": weather.call_id, "output": "20°"},
            {
                "type": "function_call_output",
                "call_id": now.call_id,
                "output": [{"type": "input_text", "text": "noon"}],
            },
        ]
        second = await answered(sdk, streamed, **{**ASKED, "input": history}, tools=TOOLS)
    assert [item.type for item in second.output] == ["reasoning", "message"] and second.output_text == "Sunny."
    assert qwen.prompts[1].partition("Weather?<|im_end|>\n")[2] == (
        f"<|im_start|>assistant\n{SAID}<|im_end|>\n<|im_start|>user\n<tool_response>\n20°\n</tool_response>"
        "\n<tool_response>\nnoon\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_llamas_calls(llama: Model, streamed: bool) -> None:
    llama.says = ['{"name": "get_weather", "parameters": {"city": "Paris"}}', "Sunny."]
    async with llama.served() as url, chat(url) as sdk:
        first = await answered(sdk, streamed, **ASKED, tools=TOOLS)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "20°"}
        second = await answered(sdk, streamed, **{**ASKED, "input": [*first.output, result]}, tools=TOOLS)
    assert (call.name, json.loads(call.arguments), second.output_text) == (
        "get_weather", {"city": "Paris"}, "Sunny.",
    )  # fmt: skip


async def test_every_form_of_a_message_is_the_same_prompt(qwen: Model) -> None:
    part = {"type": "input_text", "text": "Weather?"}
    old = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": None}
    said = [{**old, "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": None}]}]
    forms: list[Any] = [
        "Weather?", [{"role": "user", "content": "Weather?"}], [{"role": "user", "content": [part]}],
        [{"type": "message", "role": "user", "content": [{**part, "text": "Wea"}, {**part, "text": "ther?"}]}],
        [{"role": "user", "content": "Hello"}, *said, {"role": "user", "content": "Weather?"}],
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."},
         {"role": "user", "content": "Weather?"}],
    ]  # fmt: skip
    qwen.says = ["Hi."] * 8
    for form in forms:
        await post(qwen, input=form)
    await post(qwen, instructions="Be brief.")
    await post(qwen, input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?"}])
    assert set(qwen.prompts[:4]) == {CHATTED}
    hello = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
    assert set(qwen.prompts[4:6]) == {hello + CHATTED}
    assert set(qwen.prompts[6:]) == {f"<|im_start|>system\nBe brief.<|im_end|>\n{CHATTED}"}


async def test_a_response_says_what_was_asked(qwen: Model) -> None:
    qwen.says = ["Hi."]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    more = {"tools": TOOLS, "tool_choice": choice, "metadata": {"a": "b"}, "store": True, "temperature": 0.5, "seed": 7}
    said = await post(qwen, **more, instructions="x", user="me", reasoning={"effort": "none", "summary": "auto"})
    assert (
        said["id"].startswith("resp_") and said["object"] == "response" and said["created_at"] <= said["completed_at"]
    )
    expected = {"metadata": {"a": "b"}, "store": False, "temperature": 0.5, "seed": 7, "tool_choice": choice,
                "user": "me", "instructions": "x", "max_output_tokens": 500, "error": None, "incomplete_details": None,
                "reasoning": {"effort": "none", "summary": None}, "text": {"format": {"type": "text"}},
                "previous_response_id": None, "top_p": 1.0, "parallel_tool_calls": True}  # fmt: skip
    assert {name: said[name] for name in expected} == expected
    assert [(tool["name"], tool["strict"]) for tool in said["tools"]] == [("get_weather", False), ("now", False)]
    assert "get_weather" not in qwen.grammars[0].partition("%json")[0]  # it is shown and may not be called


# streams


async def test_the_stream_is_openais(qwen: Model) -> None:
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
async def test_streams_fold_to_whole_answers(qwen: Model, more: dict[str, Any], size: int) -> None:
    """However it is cut, and counted the same."""
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


async def test_thoughts_are_counted(qwen: Model) -> None:
    thought, text = "<think>\nHm.\n</think>", "\n\nWell."
    qwen.says = [thought + text, text.strip(), "<b>"]
    counts = [(await post(qwen))["usage"] for _ in range(3)]
    tokens = len(qwen.tokenizer.encode_now([thought], False)[0])
    assert [count["output_tokens_details"]["reasoning_tokens"] for count in counts] == [tokens, 0, 0]


async def test_log_probabilities_are_the_texts(qwen: Model) -> None:
    qwen.says = ["<think>\nHm.\n</think>\n\nWell."]
    (_, message) = (await post(qwen, **SCORED))["output"]
    entries = message["content"][0]["logprobs"]
    qwen.says = ["Well."]
    (message,) = (await post(qwen, top_logprobs=1))["output"]
    assert [len(entry["top_logprobs"]) for entry in message["content"][0]["logprobs"]] == [1] * 5
    joined = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert joined.endswith("Well.") and "Hm" not in joined and len(entries[0]["top_logprobs"]) == 2


# ends


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_was_cut_off_says_so(qwen: Model, streamed: bool) -> None:
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


@pytest.mark.parametrize("spoken", [0, 1, 5])
async def test_a_stream_that_fails_never_completes(qwen: Model, spoken: int) -> None:
    qwen.outcome, qwen.size = Outcome.ERROR, 1
    qwen.says = ["Hello"[:spoken]] * 2
    events = await told(qwen)
    *_, error, failed = events
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", "worker_error", "worker_error")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert not {"response.completed", "response.incomplete"} & {event["type"] for event in events}
    async with qwen.served() as url, chat(url) as sdk:
        with pytest.raises(openai.APIError, match="worker failed"):
            await answered(sdk, True, **ASKED)


# forms


class Answer(BaseModel):
    city: str


async def test_a_form_is_asked_for_in_three_ways(qwen: Model) -> None:
    qwen.says = ['<think>\n</think>\n\n{"city": "Paris"}'] + ['{"city": "Paris"}'] * 2
    async with qwen.served() as url, chat(url) as sdk:
        parsed = await sdk.responses.parse(**ASKED, text_format=Answer)
        plain = await sdk.responses.create(
            **ASKED, text={"format": {"type": "json_object"}, "verbosity": "medium"}, reasoning={"effort": "none"}
        )
        await sdk.responses.create(**ASKED, extra_body={"guided_choice": ["a", "b"]})
    assert parsed.output_parsed == Answer(city="Paris")
    assert plain.output_text == '{"city": "Paris"}' and plain.text and plain.text.format
    assert plain.text.format.type == "json_object"
    assert all(qwen.grammars) and len(set(qwen.grammars)) == 3


async def test_choices_of_tools_become_grammars(qwen: Model) -> None:
    function = {"type": "function", "name": "now"}
    names = [None, "required", "none", function, {"type": "allowed_tools", "mode": "required", "tools": [function]}]
    qwen.says = [NOW] * len(names)
    for name in names:
        await post(qwen, tools=TOOLS, tool_choice=name, parallel_tool_calls=False)
    auto, required, none, one, allowed = qwen.grammars
    assert one == allowed and "get_weather" not in one and "%json" not in none and "get_weather" in required
    assert len({auto, required, none, one}) == 4


# refusals


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


CALLED = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"input": None}, 400, "input"), ({"input": ""}, 400, "input"), ({"input": []}, 400, "input"),
    ({"input": 5}, 400, "input"), ({"input": [5]}, 400, "input[0]"),
    ({"input": [{"content": "a"}]}, 400, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 422, "input[0].type"),
    ({"input": [{"role": "tool", "content": "a"}]}, 422, "input[0].role"),
    ({"input": user({"type": "input_image", "image_url": "http://a"})}, 422, "input[0].content[0].type"),
    ({"input": user({"type": "input_file", "file_id": "a"})}, 422, "input[0].content[0].type"),
    ({"input": [CALLED]}, 422, "input"), ({"input": [{**CALLED, "type": "function_call_output", "output": "a"}]}, 422,
     "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]}, 422, "input"),
    ({"input": "a" * 9000}, 422, "input"),
    ({"previous_response_id": "resp_1"}, 422, "previous_response_id"), ({"conversation": "c"}, 422, "conversation"),
    ({"background": True}, 422, "background"), ({"prompt": {"id": "a"}}, 422, "prompt"),
    ({"truncation": "auto"}, 422, "truncation"), ({"n": 2}, 422, "n"), ({"max_tokens": 5}, 422, "max_tokens"),
    ({"max_output_tokens": 0}, 422, "max_output_tokens"), ({"include": ["all"]}, 422, "include"),
    ({"top_logprobs": 21}, 422, "top_logprobs"), ({"text": {"verbosity": "low"}}, 422, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}}, 422, "text.format.schema"),
    ({"reasoning": {"effort": "much"}}, 422, "reasoning.effort"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, 422, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 422, "tools[0].function"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, 422, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, 422, "tool_choice.type"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "status", "param"), REFUSED)
async def test_refusals_name_the_field(qwen: Model, more: dict[str, Any], status: int, param: str) -> None:
    answer = await sent(qwen, **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert not qwen.link.submitted


async def test_who_does_not_think_says_so_of_its_field(folder: Path) -> None:
    plain = Model(tokenizer_with(folder / "plain", "{{ raise_exception('no') if messages | length > 1 }}a"))
    asked = [
        await post(plain, **more)
        for more in ({"reasoning": {"effort": "low"}}, {"tools": TOOLS}, {"instructions": "be brief"})
    ]
    assert [one["error"]["param"] for one in asked] == ["reasoning.effort", "tools", "input"]


async def test_nothing_is_stored(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        for method, path, status in (
            ("GET", "/v1/responses/resp_1", 404), ("DELETE", "/v1/responses/resp_1", 404),
            ("POST", "/v1/responses/resp_1/cancel", 404), ("GET", "/v1/responses", 405),
        ):  # fmt: skip
            answer = await http.request(method, path)
            assert answer.status_code == status and answer.json()["error"]["type"] == "not_found_error"


async def test_counting_sees_what_a_request_would(qwen: Model) -> None:
    qwen.says = ["Hi."]
    more: dict[str, Any] = {"model": MODEL, "input": "Hi", "instructions": "Be brief.", "tools": TOOLS}
    async with qwen.served() as url, chat(url) as sdk:
        counted = await sdk.responses.input_tokens.count(**more)
        asked = await sdk.responses.create(**more)
    assert asked.usage and counted.input_tokens == asked.usage.input_tokens > 10
