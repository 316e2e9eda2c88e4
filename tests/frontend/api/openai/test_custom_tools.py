"""Custom tools, whose input is a text, in responses and in chats; and sessions that began with another model."""

import json
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.fakes import MODEL
from tests.frontend.api.harness import parse_events, parse_sse
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model

PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-x = "ä"\n+x = "\\n"\n*** End Patch\n'
SAID = f"I patch.<tool_call>\n{json.dumps({'name': 'apply_patch', 'arguments': {'input': PATCH}})}\n</tool_call>"
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " /(.|\\n)*/'}
TOKENS = {"type": "grammar", "syntax": "lark", "definition": "start: <[9]> /.*/"}
REGEX = {"type": "grammar", "syntax": "regex", "definition": r"[ab]+|\*\*\* .*"}
TOOL: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
SHELL: dict[str, Any] = {"type": "function", "name": "shell", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}  # fmt: skip


def in_chat(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool of the Responses API in the form of chats."""
    inner = {key: value for key, value in tool.items() if key != "type"}
    if inner.get("format", {}).get("type") == "grammar":
        inner["format"] = {
            "type": "grammar",
            "grammar": {key: inner["format"][key] for key in ("syntax", "definition")},
        }
    return {"type": tool["type"], tool["type"]: inner}


def path_of(ask: Any) -> str:
    return "tools[0].format.definition" if ask is respond else "tools[0].custom.format.grammar.definition"


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.get_error()
    data = text.encode()
    return bool(matcher.try_consume_tokens(list(data)) == len(data))


async def post(model: Model, path: str, **body: Any) -> httpx.Response:
    async with http_client(model.pool, model.tokenizer) as http:
        return await http.post(path, json={"model": MODEL, **body})


async def respond(model: Model, **body: Any) -> httpx.Response:
    return await post(model, "/v1/responses", **{"input": "Go", **body})


async def chat(model: Model, **body: Any) -> httpx.Response:
    return await post(model, "/v1/chat/completions", **{"messages": [{"role": "user", "content": "Go"}], **body})


@pytest.mark.parametrize("size", [1, 3, 500])
async def test_response_has_the_call_of_a_custom_tool(qwen: Model, size: int) -> None:
    qwen.says, qwen.size = [SAID, SAID], size
    whole = (await respond(qwen, tools=[TOOL, SHELL])).json()
    events = parse_events((await respond(qwen, tools=[TOOL, SHELL], stream=True)).text)
    message, call = whole["output"]
    assert message["content"][0]["text"] == "I patch."
    assert (call["type"], call["name"], call["input"], call["status"]) == (
        "custom_tool_call", "apply_patch", PATCH, "completed",
    )  # fmt: skip
    assert whole["tools"][0] == {**TOOL, "format": {"type": "text"}}
    pieces = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(pieces) == PATCH and all(pieces)
    [done] = [one for one in events if one["type"] == "response.custom_tool_call_input.done"]
    streamed = events[-1]["response"]["output"][1]
    assert done["input"] == streamed["input"] == PATCH and done["item_id"] == streamed["id"]
    assert not [one for one in events if "function_call" in one["type"]]


async def test_official_package_reads_a_streamed_call(qwen: Model) -> None:
    qwen.says = [SAID]
    async with (
        qwen.served() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk,
        sdk.responses.stream(model=MODEL, input="Go", tools=[TOOL]) as stream,  # type: ignore[list-item]
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    call: Any = final.output[-1]
    assert (call.type, call.input) == ("custom_tool_call", PATCH)
    assert "response.custom_tool_call_input.delta" in kinds


async def test_call_that_is_cut_off_is_incomplete(qwen: Model) -> None:
    qwen.says = [SAID[: SAID.index("@@")]]
    call = (await respond(qwen, tools=[TOOL])).json()["output"][-1]
    assert (call["status"], call["input"]) == ("incomplete", PATCH[: PATCH.index("@@")])


@pytest.mark.parametrize("size", [1, 500])
async def test_chat_has_the_call_of_a_custom_tool(qwen: Model, size: int) -> None:
    qwen.says, qwen.size = [SAID, SAID], size
    tools = [in_chat(TOOL), in_chat(SHELL)]
    choice = (await chat(qwen, tools=tools)).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call == {"id": call["id"], "type": "custom", "custom": {"name": "apply_patch", "input": PATCH}}
    assert choice["finish_reason"] == "tool_calls"
    *chunks, _ = parse_sse((await chat(qwen, tools=tools, stream=True)).text)
    deltas = [part for chunk in chunks for one in chunk["choices"] for part in one["delta"].get("tool_calls", ())]
    assert deltas[0]["type"] == "custom" and deltas[0]["custom"] == {"name": "apply_patch", "input": ""}
    assert "".join(part["custom"]["input"] for part in deltas) == PATCH


async def test_call_of_a_chat_goes_back_into_the_prompt(qwen: Model) -> None:
    qwen.says = ["Done."]
    call = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": PATCH}}
    history = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": "ok"}]  # fmt: skip
    assert (await chat(qwen, messages=history, tools=[in_chat(TOOL)])).status_code == 200
    assert json.dumps({"input": PATCH}, ensure_ascii=False) in qwen.prompts[0]


@pytest.mark.parametrize("ask", [respond, chat])
@pytest.mark.parametrize(
    ("form", "named"), [(None, False), ({"type": "text"}, False), (REGEX, False), (LARK, False), (TOKENS, True)]
)
async def test_grammar_of_a_custom_tool_is_enforced_or_named(
    qwen: Model, ask: Any, form: dict[str, Any] | None, named: bool
) -> None:
    qwen.says = ["Hi."]
    tool = TOOL | ({"format": form} if form else {})
    answer = await ask(qwen, tools=[tool if ask is respond else in_chat(tool)])
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("X-Sluice-Not-Enforced") == (path_of(ask) if named else None)
    assert ("keeps to this Lark grammar" in qwen.prompts[0]) == (form in (LARK, TOKENS))
    if form not in (REGEX, LARK):
        return
    for text, allowed in (("*** ab", True), ('*** "\\\n', form is LARK), ("Patch", False)):
        call = json.dumps({"name": "apply_patch", "arguments": {"input": text}}, ensure_ascii=False)
        assert accepts(qwen.grammars[0], f"<tool_call>\n{call}\n</tool_call>") == allowed, text


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/responses/input_tokens"])
@pytest.mark.parametrize("definition", ["start: nothing", "start: A\nA: /a/ & /b/", 'start: "a" b\nb: "b" b'])
async def test_grammar_of_a_custom_tool_that_cannot_be_compiled_is_refused(
    qwen: Model, path: str, definition: str
) -> None:
    tool = TOOL | {"format": LARK | {"definition": definition}}
    flat = "responses" in path
    body = {"input": "Go"} if flat else {"messages": [{"role": "user", "content": "Go"}]}
    answer = await post(qwen, path, tools=[tool if flat else in_chat(tool)], **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) in ((422, "invalid_grammar"), (400, "invalid_grammar")), answer.text
    assert error["param"] == path_of(respond if flat else chat)


@pytest.mark.parametrize("ask", [respond, chat])
async def test_custom_tool_can_be_forced(qwen: Model, ask: Any) -> None:
    qwen.says = [SAID.removeprefix("I patch.")] * 2
    one = {"type": "custom", "name": "apply_patch"}
    flat = ask is respond
    tools = [TOOL, SHELL] if flat else [in_chat(TOOL), in_chat(SHELL)]
    for choice in (one, {"type": "allowed_tools", "mode": "required", "tools": [one]}):
        if not flat:
            inner = [in_chat(each) for each in choice.get("tools", ())]
            choice = in_chat(one) if choice is one else {
                "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": inner}}  # fmt: skip
        answer = await ask(qwen, tools=tools, tool_choice=choice)
        assert answer.status_code == 200, answer.text
    wrong = await ask(qwen, tools=tools, tool_choice=one | {"name": "no"} if flat else in_chat(one | {"name": "no"}))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tool_choice")


async def test_custom_tool_without_a_name_is_refused(qwen: Model) -> None:
    for ask, tool, param in ((respond, {"type": "custom"}, "tools[0].name"),
                             (chat, {"type": "custom", "custom": {}}, "tools[0].custom.name")):  # fmt: skip
        answer = await ask(qwen, tools=[tool])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# items of other tools

CALLED: dict[str, tuple[list[dict[str, Any]], list[str]]] = {  # what the items are → items, what the prompt shows
    "custom": ([{"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "pat"},
                {"type": "custom_tool_call_output", "call_id": "1", "output": "fine"}],
               ['"apply_patch"', '"input": "pat"', "fine"]),
    "custom in parts": ([{"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "", "id": "ctc_1"},
                         {"type": "custom_tool_call_output", "call_id": "1",
                          "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
                        ["a\nb"]),
    "local shell": ([{"type": "local_shell_call", "id": "l1", "call_id": "1", "status": "completed",
                      "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None}},
                     {"type": "local_shell_call_output", "call_id": "1", "output": '{"output": "a.py"}'}],
                    ['"local_shell"', '["ls", "-l"]', "a.py"]),
    "local shell as documented": ([{"type": "local_shell_call", "id": "l1", "call_id": "l1", "status": "completed",
                                    "action": {"type": "exec", "command": ["ls"], "env": {}}},
                                   {"type": "local_shell_call_output", "id": "l1", "output": "a.py"}], ["a.py"]),
    "shell": ([{"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"]}, "status": "completed"},
               {"type": "shell_call_output", "call_id": "1", "max_output_length": 9, "output": [
                   {"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]}],
              ['"shell"', '["ls"]', '"stdout": "a.py"']),
    "apply patch": ([{"type": "apply_patch_call", "call_id": "1", "status": "completed",
                      "operation": {"type": "delete_file", "path": "a.py"}},
                     {"type": "apply_patch_call_output", "call_id": "1", "status": "failed"}],
                    ['"apply_patch"', "delete_file", "failed"]),
    "computer": ([{"type": "computer_call", "id": "c", "call_id": "1", "pending_safety_checks": [],
                   "action": {"type": "click", "x": 1, "y": 2, "button": "left"}},
                  {"type": "computer_call_output", "call_id": "1",
                   "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,"}}],
                 ['"computer"', "click", "(screenshot)"]),
    "a server's tool": ([{"type": "mcp_list_tools", "id": "m0", "server_label": "s", "tools": []},
                         {"type": "mcp_call", "id": "m1", "name": "ask", "arguments": '{"q": 1}', "server_label": "s",
                          "output": "42", "error": None}], ['"ask"', '"q": 1', "42"]),
    "a server's tool that failed": ([{"type": "mcp_call", "id": "m1", "name": "ask", "arguments": "{}",
                                      "server_label": "s", "error": {"type": "x"}}], ['Error: {"type": "x"}']),
}  # fmt: skip
UNSEEN: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "HIDDEN"}},
    {"type": "file_search_call", "id": "f", "status": "searching", "queries": ["HIDDEN"], "results": None},
    {"type": "image_generation_call", "id": "i", "status": "generating", "result": "HIDDEN"},
    {"type": "code_interpreter_call", "id": "x", "status": "completed", "code": "HIDDEN", "container_id": "c",
     "outputs": None},
    {"type": "compaction", "encrypted_content": "HIDDEN"},
    {"type": "reasoning", "summary": [], "encrypted_content": "HIDDEN"},
    {"type": "tool_search_call", "arguments": {"query": "HIDDEN"}, "call_id": "t", "execution": "client"},
    {"type": "tool_search_output", "tools": [], "call_id": "t", "execution": "client"},
    {"type": "mcp_approval_request", "id": "a", "name": "HIDDEN", "arguments": "{}", "server_label": "s"},
    {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
]  # fmt: skip
GO = {"role": "user", "content": "Go on"}


@pytest.mark.parametrize(("items", "shown"), CALLED.values(), ids=CALLED)
async def test_call_of_another_tool_is_shown_as_a_function_call(
    qwen: Model, items: list[dict[str, Any]], shown: list[str]
) -> None:
    qwen.says = ["Hi."]
    answer = await respond(qwen, input=[GO, *items, GO])
    assert answer.status_code == 200 and "X-Sluice-Ignored-Fields" not in answer.headers, answer.text
    assert not [text for text in shown if text not in qwen.prompts[0]], qwen.prompts[0]
    async with http_client(qwen.pool, qwen.tokenizer) as http:
        counted = await http.post("/v1/responses/input_tokens", json={"input": [GO, *items, GO]})
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]


@pytest.mark.parametrize("item", UNSEEN, ids=lambda item: item["type"])
async def test_item_that_only_openais_servers_can_read_is_not_shown(qwen: Model, item: dict[str, Any]) -> None:
    qwen.says = ["Hi.", "Hi."]
    answers = [await respond(qwen, input=[GO, *more, GO]) for more in ([item], [])]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert "HIDDEN" not in qwen.prompts[0]


async def test_session_of_ten_turns_that_began_elsewhere_goes_on(qwen: Model) -> None:
    qwen.says = [SAID.replace("I patch.", f"Turn {turn}.") for turn in range(10)]
    tools = [TOOL | {"format": LARK}, SHELL, {"type": "web_search"}, {"type": "local_shell"}]
    history: list[Any] = [GO, *UNSEEN, *[item for items, _ in CALLED.values() for item in items], GO]
    for turn in range(10):
        answer = await respond(
            qwen, input=history, tools=tools, instructions="You are Codex.", store=False, stream=True
        )
        events = parse_events(answer.text)
        output = events[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["message", "custom_tool_call"], turn
        history += output
        history.append({"type": "custom_tool_call_output", "call_id": output[-1]["call_id"], "output": f"ok {turn}"})
    begun = [prompt.removesuffix("<|im_start|>assistant\n") for prompt in qwen.prompts]
    assert all(later.startswith(before) for before, later in pairwise(begun)), "each turn extends the prefix"
